// A chat completion as it is streamed: server-sent events out of fetch, and what goes wrong in words.

/** Something to be told to the user; `status` is the HTTP status where there was one. */
export class Trouble extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

/** The ids of the models that the server has. */
export async function models(key) {
  const answer = await send("v1/models", { headers: headers(key) });
  const { data } = await answer.json();
  return data.map((model) => model.id);
}

/**
 * The events of a streamed chat completion: {name, data} with name "message", "draft" or "canvas" and data parsed.
 * Returns after [DONE]. Throws Trouble for what the server refuses or breaks off, AbortError when `signal` fires.
 */
export async function* complete(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_drafts: true, stream_options: { include_usage: true } });
  const answer = await send("v1/chat/completions", { method: "POST", headers: headers(key), body, signal });
  for await (const { name, text } of events(answer.body, signal)) {
    if (text === "[DONE]") return;
    const data = parsed(text);
    if (data.error) throw new Trouble(`The server gave up: ${data.error.message ?? JSON.stringify(data.error)}`);
    yield { name, data };
  }
  throw new Trouble("The stream broke off before the answer was complete.");
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function send(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Trouble("The server cannot be reached. Is it still running?");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  const text = await answer.text();
  let message = text.slice(0, 300) || answer.statusText;
  try {
    message = JSON.parse(text).error.message ?? message;
  } catch {
    // no error object of OpenAI's shape: a proxy's page, say; its text has to do
  }
  const wait = answer.headers.get("Retry-After");
  const lead =
    answer.status === 401 ? "The server wants an API key: see Settings."
    : answer.status === 429 ? `The server is busy${wait ? `, try again in ${wait} s` : ""}.`
    : answer.status >= 500 ? `The server failed (${answer.status}).`
    : `The server refuses this request (${answer.status}).`;
  return new Trouble(`${lead} ${message}`, answer.status);
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    if (value instanceof Object) return value;
  } catch {
    // told below, as other values than objects are
  }
  throw new Trouble(`The stream holds something that is no JSON object: ${text.slice(0, 80)}`);
}

/** The server-sent events of a response's body; comments (heartbeats) are dropped. */
async function* events(body, signal) {
  let name = "message";
  let data = [];
  try {
    for await (const line of lines(body.pipeThrough(new TextDecoderStream()).getReader())) {
      const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
      if (line === "") {
        if (data.length) yield { name, text: data.join("\n") };
        [name, data] = ["message", []];
      } else if (field === "event") name = value;
      else if (field === "data") data.push(value);
    }
  } catch (error) {
    if (error instanceof TypeError && !signal.aborted) throw new Trouble("The connection broke off in the middle.");
    throw error;
  }
}

async function* lines(reader) {
  let rest = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const found = (rest + part.value).split(/\r\n|\n|\r(?!$)/); // a \r at the end may be half of \r\n
      rest = found.pop();
      yield* found;
    }
  } finally {
    reader.cancel().catch(() => {}); // of a stream that has failed: the error is already on its way
  }
}
