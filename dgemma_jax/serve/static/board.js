// The canvas on the screen: one cell per position, and the replay of a record.

import { Record, caption, heat } from "./record.js";

const SLOWEST = 320; // ms between two frames, slow enough to see a canvas that takes two steps
const FASTEST = 40; // ms, of a replay
const LONGEST = 8000; // ms that a replay of many frames takes
const BEHIND = 1500; // ms that the picture may lag behind the server: the more frames wait, the faster they pass
const EMPTY = 32; // cells before anything was asked
const STATES = { accepted: "kept", noise: "drawn anew", cut: "behind the end of the answer" };
const CONTROL = /^<\||\|>$|^<(bos|eos|pad|unk|mask|unused\d+)>$/;
const LOWEST = 0.06; // of the height of a bar, so that there is something to see
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Board {
  #record = new Record();
  #at = 0; // the frame on the screen
  #timer = null; // of the next frame while playing
  #live = false; // plays on as frames come in
  #pace = null; // ms between the frames of a replay, null when following the server
  #position = null; // looked at by pointer or arrow keys
  #next = null; // the browser's next frame, which takes in what has come
  #complete = false; // the record grows no more

  constructor(byId) {
    for (const id of ["frame", "cells", "inspected", "back", "play", "forward", "bars", "scrubber"]) this[id] = byId(id);
    this.scrubber.addEventListener("input", () => this.#seek(Number(this.scrubber.value)));
    this.back.addEventListener("click", () => this.#seek(this.#at - 1));
    this.forward.addEventListener("click", () => this.#seek(this.#at + 1));
    this.play.addEventListener("click", () => (this.#playing ? this.#pause() : this.#replay()));
    this.cells.addEventListener("pointerover", ({ target }) => this.#look(target === this.cells ? null : indexOf(target)));
    this.cells.addEventListener("pointerleave", () => this.#look(null));
    this.cells.addEventListener("blur", () => this.#look(null));
    this.cells.addEventListener("keydown", (event) => this.#key(event));
    this.clear();
  }

  /** Shows nothing but an empty canvas. */
  clear() {
    this.#take(new Record(), EMPTY);
    this.frame.textContent = "Ask something and watch.";
  }

  /** Shows a record that grows, as it grows. */
  follow(record) {
    this.#take(record, this.cells.childElementCount);
    [this.#live, this.#pace] = [true, null];
    this.frame.textContent = "The model reads the prompt.";
    this.#buttons();
  }

  /** Replays a record from its start. */
  show(record) {
    this.#take(record, this.cells.childElementCount);
    this.frame.textContent = "Nothing was recorded.";
    if (record.frames.length) this.#replay();
  }

  /** To be called when `record` has grown or is complete; does nothing for one that is not on the screen. */
  update(record, complete = false) {
    if (record !== this.#record) return;
    this.#complete = complete;
    this.#next ??= requestAnimationFrame(() => this.#grow()); // drafts may come faster than they can be drawn
  }

  #grow() {
    const { frames } = this.#record;
    this.#next = null;
    this.bars.setAttribute("viewBox", `0 0 ${Math.max(frames.length, 1)} 1`);
    this.bars.querySelector("path").setAttribute("d", frames.map(bar).join(""));
    this.scrubber.max = Math.max(frames.length - 1, 0);
    if (this.#live && !this.#timer && frames.length) this.#tick();
    if (this.#complete) this.#live = false;
    this.#buttons();
  }

  get #playing() {
    return this.#live || this.#timer !== null;
  }

  #take(record, width) {
    [this.#record, this.#at, this.#position, this.#complete] = [record, -1, null, false];
    this.bars.querySelector("rect").setAttribute("x", -1);
    this.cells.replaceChildren();
    this.#fill(width);
    this.#describe();
    this.#pause();
    this.#grow();
  }

  #pause() {
    clearTimeout(this.#timer);
    [this.#timer, this.#live] = [null, false];
    this.#buttons();
  }

  #seek(index) {
    this.#pause();
    this.#draw(index);
  }

  #replay() {
    const { length } = this.#record.frames;
    this.#pace = Math.max(FASTEST, Math.min(SLOWEST, LONGEST / length));
    if (this.#at >= length - 1) this.#at = -1;
    this.#tick();
  }

  /** Draws the next frame and waits for the one after it. Without motion there is only the last one to be seen. */
  #tick() {
    const waiting = this.#record.frames.length - 1 - this.#at;
    if (waiting <= 0) {
      this.#timer = null;
      this.#buttons();
      return;
    }
    this.#timer = setTimeout(() => this.#tick(), this.#pace ?? Math.min(SLOWEST, BEHIND / waiting));
    this.#draw(this.#pace === null && calm.matches ? this.#at + waiting : this.#at + 1);
  }

  #draw(index) {
    const frame = this.#record.frames[index];
    this.#at = index;
    this.#fill(frame.tokens.length);
    frame.tokens.forEach((token, position) => paint(this.cells.children[position], token, frame, position));
    this.frame.textContent = caption(frame);
    this.scrubber.value = index;
    this.scrubber.setAttribute("aria-valuetext", caption(frame));
    this.bars.querySelector("rect").setAttribute("x", index);
    this.#describe();
    this.#buttons();
  }

  #fill(count) {
    const missing = count - this.cells.childElementCount;
    for (let i = 0; i < missing; i++) this.cells.append(cell());
    for (let i = 0; i > missing; i--) this.cells.lastElementChild.remove();
  }

  #buttons() {
    const { length } = this.#record.frames;
    this.scrubber.disabled = this.play.disabled = length === 0;
    this.back.disabled = this.#at <= 0;
    this.forward.disabled = this.#at >= length - 1;
    this.play.textContent = this.#playing ? "Pause" : "Play";
    this.inspected.ariaLive = this.#playing ? "off" : "polite"; // a screen reader need not read every step
  }

  #key(event) {
    const columns = getComputedStyle(this.cells).gridTemplateColumns.split(" ").length;
    const last = this.cells.childElementCount - 1;
    const at = this.#position ?? -1;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns };
    const to = { ...moves, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#look(Math.min(Math.max(to, 0), last));
    this.cells.children[this.#position].scrollIntoView({ block: "nearest" });
  }

  #look(position) {
    this.cells.children[this.#position]?.removeAttribute("data-looked-at");
    this.#position = position;
    this.cells.children[position]?.toggleAttribute("data-looked-at", true);
    this.#describe();
  }

  #describe() {
    const frame = this.#record.frames[this.#at];
    const known = frame && frame.step > 0 && this.#position !== null && this.#position < frame.tokens.length;
    this.inspected.textContent = known ? about(frame, this.#position) : "";
  }
}

function cell() {
  const made = document.createElement("span");
  made.className = "cell";
  made.dataset.state = "noise";
  made.style.setProperty("--heat", heat(null));
  return made;
}

function paint(made, token, frame, position) {
  const text = visible(token);
  if (made.textContent !== text) made.textContent = text;
  made.dataset.state = frame.states[position];
  made.dataset.size = text.length > 8 ? "small" : text.length > 5 ? "medium" : "large";
  made.toggleAttribute("data-control", CONTROL.test(token));
  made.style.setProperty("--heat", frame.done ? 0 : heat(frame.entropy[position]).toFixed(3));
}

/** The path of a frame's bar, as high as the frame is unsure. */
function bar(frame, index) {
  const top = 1 - Math.max(LOWEST, frame.done ? 0 : heat(frame.mean));
  return `M${index} 1V${top.toFixed(3)}h.9V1z`;
}

function about(frame, position) {
  const nats = frame.entropy[position].toFixed(3);
  const state = frame.done && frame.states[position] === "accepted" ? "in the answer" : STATES[frame.states[position]];
  return `Position ${position + 1}: ${JSON.stringify(frame.tokens[position])}, entropy ${nats} nats, ${state}`;
}

/** A token's text without the blanks around it, or the blanks made visible where there is nothing else. */
function visible(token) {
  const text = token.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return text.trim() || text.replaceAll(" ", "␣");
}

function indexOf(element) {
  return [...element.parentElement.children].indexOf(element);
}
