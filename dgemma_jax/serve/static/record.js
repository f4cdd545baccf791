// What happened on the canvases of one answer: every draft, kept for the replay.

/**
 * A frame is one picture of a canvas: {canvas, step, tokens, states, entropy, mean, accepted, done}.
 * canvas and step count from 1; step 0 is the random start, of which the server tells nothing but the width. states holds
 * "accepted", "noise" or "cut" per position, entropy nats per position (null: unknown), mean nats of the canvas.
 */
export class Record {
  frames = [];

  /** Takes the data of a draft event. */
  draft({ canvas, step, tokens, accepted, entropy, mean_entropy: mean }) {
    if (canvas + 1 !== this.frames.at(-1)?.canvas) this.#start(canvas + 1, tokens.length);
    const states = accepted.map((kept) => (kept ? "accepted" : "noise"));
    const count = accepted.filter(Boolean).length;
    this.frames.push({ canvas: canvas + 1, step, tokens, states, entropy, mean, accepted: count, done: false });
  }

  /** Takes the data of a canvas event: positions behind its tokens lie behind the end of the answer. */
  canvas({ steps, tokens }) {
    const last = this.frames.at(-1);
    if (!last) return; // the drafts were not sent
    const states = last.tokens.map((_, position) => (position < tokens.length ? "accepted" : "cut"));
    this.frames.push({ ...last, step: steps, states, accepted: tokens.length, done: true });
  }

  #start(canvas, width) {
    const fill = (value) => Array(width).fill(value);
    const [tokens, states, entropy] = [fill(""), fill("noise"), fill(null)];
    this.frames.push({ canvas, step: 0, tokens, states, entropy, mean: null, accepted: 0, done: false });
  }
}

/** How unsure an entropy in nats is, 0 .. 1: one minus the inverse of the perplexity. Unknown is as unsure as can be. */
export function heat(nats) {
  return nats === null ? 1 : 1 - Math.exp(-nats);
}

/** A frame in words. */
export function caption({ canvas, step, tokens, mean, accepted, done }) {
  if (step === 0) return `Canvas ${canvas}, before step 1: ${tokens.length} random tokens`;
  if (done) return `Canvas ${canvas}, done after ${counted(step, "step")}: ${counted(accepted, "token")} of the answer`;
  return `Canvas ${canvas}, step ${step}: ${accepted} of ${tokens.length} kept, mean entropy ${mean.toFixed(3)} nats`;
}

/** "1 step", "2 steps". */
export function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
}
