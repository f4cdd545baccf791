// The conversation on the screen. Whatever a model or a server says is set as text, never as markup.

import { Record, counted } from "./record.js";

/** What the user said, or a tool. */
export function turnOf(speaker, text) {
  return turn("user", speaker, node("p", { className: "text", textContent: text }));
}

/** One answer of the model, growing with the events of its stream. */
export class Answer {
  record = new Record();
  calls = []; // {id, name, arguments}; arguments is JSON text
  #content = "";
  #reasoning = "";
  #finish = null;
  #usage = null;

  /** onshow is called when the user wants to see this answer's canvases again. */
  constructor(onshow) {
    this.thought = node("p", { className: "text" });
    this.reasoning = node("details", { className: "reasoning", open: true, hidden: true });
    this.reasoning.append(node("summary", { textContent: "Reasoning" }), this.thought);
    this.text = node("p", { className: "text" });
    this.called = node("div", { className: "calls" });
    this.note = node("p", { className: "note", hidden: true });
    this.figures = node("p", { className: "figures" });
    this.replay = node("button", { type: "button", textContent: "Show its canvases", hidden: true, onclick: onshow });
    const foot = node("div", { className: "foot" });
    foot.append(this.figures, this.replay);
    this.element = turn("model", "Model", this.reasoning, this.text, this.called, this.note, foot);
  }

  /** Takes one event of the stream. */
  take({ name, data }) {
    if (name === "draft") this.record.draft(data);
    else if (name === "canvas") this.record.canvas(data);
    else if (name === "message") this.#chunk(data);
  }

  /** The turn is complete: writes its figures and returns it as a message of the conversation. */
  complete(seconds) {
    this.#close(seconds);
    if (this.#finish === "length") this.#say("Cut at the longest answer or the end of the context.");
    const message = { role: "assistant", content: this.#content };
    if (this.#reasoning) message.reasoning_content = this.#reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
    }
    return message;
  }

  /** The turn was stopped or failed: the conversation goes on without it. */
  forget(why, seconds) {
    this.#close(seconds);
    this.element.toggleAttribute("data-forgotten", true);
    this.#say(`${why} This turn is forgotten.`);
  }

  #chunk({ choices, usage }) {
    this.#usage = usage ?? this.#usage;
    for (const { delta, finish_reason: finish } of choices) {
      this.#finish = finish ?? this.#finish;
      this.#content += delta.content ?? "";
      this.#reasoning += delta.reasoning_content ?? "";
      for (const call of delta.tool_calls ?? []) this.#call(call);
    }
    update(this.text, this.#content);
    update(this.thought, this.#reasoning);
    this.reasoning.hidden = !this.#reasoning;
  }

  #call({ index, id, function: part }) {
    const call = (this.calls[index] ??= { id, name: "", arguments: "" });
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
    const shown = this.called.children[index] ?? this.called.appendChild(callElement());
    update(shown.firstElementChild, call.name);
    update(shown.lastElementChild, indented(call.arguments));
  }

  #close(seconds) {
    const { canvases, denoising_steps: steps, tokens_per_step: rate } = this.#usage?.diffusion ?? {};
    const taken = canvases === undefined ? [] : [counted(canvases, "canvas"), counted(steps, "step")];
    if (rate !== undefined) taken.push(`${rate.toFixed(1)} tokens per step`);
    this.figures.textContent = [...taken, `${seconds.toFixed(1)} s`].join(" · ");
    this.replay.hidden = !this.record.frames.length;
  }

  #say(text) {
    this.note.hidden = false;
    this.note.textContent = text;
  }
}

/** A form for the results of tool calls; onresults gets their tool messages. */
export function results(calls, onresults) {
  const form = node("form", { className: "results" });
  for (const call of calls) {
    const label = node("label", { textContent: `Result of ${call.name}` });
    label.append(node("textarea", { rows: 2, required: true, name: call.id }));
    form.append(label);
  }
  form.append(node("button", { className: "main", textContent: calls.length > 1 ? "Send results" : "Send result" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = new FormData(form);
    onresults(calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: values.get(id) })));
  });
  return form;
}

function callElement() {
  const call = node("div", { className: "call" });
  call.append(node("code"), node("pre"));
  return call;
}

function turn(kind, speaker, ...parts) {
  const made = node("article", { className: `turn ${kind}` });
  made.append(node("h3", { textContent: speaker }), ...parts);
  return made;
}

function node(name, properties = {}) {
  return Object.assign(document.createElement(name), properties);
}

/** Sets a text that only grows by its new end, so that a screen reader reads nothing twice. */
function update(element, text) {
  const shown = element.textContent;
  if (text.startsWith(shown)) element.append(text.slice(shown.length));
  else element.textContent = text;
}

/** JSON as one can read it; while it is incomplete, as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
