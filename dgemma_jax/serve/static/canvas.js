// The canvas page: a conversation with the server that sends it, and every draft of every canvas to be looked at.

import { Board } from "./board.js";
import { Images, contentOf, picture } from "./images.js";
import { Settings } from "./settings.js";
import { Trouble, complete, models } from "./stream.js";
import { Answer, results, turnOf } from "./talk.js";

const NEAR = 40; // px from its end, within which the conversation stays at its end

const byId = (id) => document.getElementById(id);
const [ask, prompt, send, stop, log, status] = ["ask", "prompt", "send", "stop", "log", "status"].map(byId);
const settings = new Settings(byId);
const board = new Board(byId);
const images = new Images(byId, (trouble) => (status.textContent = trouble));

let model = null; // its name, once the server has told it
let talk = fresh();

/** messages: what was said; running: the AbortController of an answer in the making; pending: calls want results. */
function fresh() {
  return { messages: [], running: null, pending: false };
}

/** Shows `said` and answers it. True if that worked; else the conversation is as it was before, and the reason shown. */
async function answer(said, messages) {
  let options;
  status.textContent = "";
  try {
    options = settings.request();
  } catch (error) {
    status.textContent = words(error);
    return false;
  }
  const own = talk;
  const { signal } = (own.running = new AbortController());
  const turn = new Answer(() => board.show(turn.record));
  const start = performance.now();
  const seconds = () => (performance.now() - start) / 1000;
  log.append(...said, turn.element);
  log.scrollTop = log.scrollHeight;
  board.follow(turn.record);
  show();
  try {
    await receive(turn, { messages: [...own.messages, ...messages], ...options }, signal);
    own.messages.push(...messages, turn.complete(seconds()));
    own.pending = turn.calls.length > 0;
    if (own.pending) offerResults(turn);
    return true;
  } catch (error) {
    if (error.status === 401) settings.settings.open = true;
    turn.forget(signal.aborted ? "Stopped." : words(error), seconds());
    for (const part of said) part.toggleAttribute("data-forgotten", true);
    return false;
  } finally {
    board.update(turn.record, true);
    own.running = null;
    log.scrollTop = log.scrollHeight; // figures, a note or a form have come below
    show();
  }
}

async function receive(turn, request, signal) {
  const key = settings.key.value;
  await learnModel(key);
  for await (const event of complete({ model, ...request }, key, signal)) {
    const speaks = event.name === "message"; // looking where the conversation stands costs a layout
    const atEnd = speaks && log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    turn.take(event);
    board.update(turn.record);
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
}

async function learnModel(key) {
  if (model) return;
  [model] = await models(key);
  byId("model").textContent = model;
}

async function submit() {
  const [own, text] = [talk, prompt.value];
  if (!text.trim() || own.running || own.pending) return;
  const urls = images.take();
  prompt.value = "";
  const said = turnOf("You", text);
  said.append(...urls.map(picture));
  const done = await answer([said], [{ role: "user", content: contentOf(text, urls) }]);
  if (done || talk !== own) return;
  if (!prompt.value) images.put(urls);
  prompt.value ||= text;
}

function offerResults(turn) {
  const form = results(turn.calls, async (messages) => {
    form.hidden = true;
    const said = messages.map(({ content }, index) => turnOf(`Result of ${turn.calls[index].name}`, content));
    form.hidden = await answer(said, messages);
  });
  turn.element.append(form);
}

function reset() {
  talk.running?.abort();
  talk = fresh();
  log.replaceChildren();
  images.put([]);
  status.textContent = "";
  board.clear();
  show();
  prompt.focus();
}

/** Brings buttons and status in line with the conversation. */
function show() {
  const { running, pending } = talk;
  if (!running && document.activeElement === stop) prompt.focus();
  stop.hidden = !running;
  send.disabled = Boolean(running) || pending;
  log.ariaBusy = Boolean(running);
  if (pending && !running) status.textContent = "The model waits for the result of its call.";
}

/** An error as a user can read it; what is not Trouble is a fault of this page, and goes to the console as well. */
function words(error) {
  if (error instanceof Trouble) return error.message;
  console.error(error);
  return `This page failed: ${error.message}`;
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
prompt.addEventListener("focus", () => prompt.select(), { once: true }); // what is there at first is an example
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") talk.running?.abort();
});
stop.addEventListener("click", () => talk.running?.abort());
byId("reset").addEventListener("click", reset);

learnModel("").catch((error) => {
  if (error.status === 401) settings.settings.open = true;
  status.textContent = words(error);
});
show();
