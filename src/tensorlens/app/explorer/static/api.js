// Talking to the server: JSON in, one answer or a stream of JSON lines out. Closing the stream stops the work.

export class Refused extends Error {}

async function refusal(response) {
  try {
    return new Refused((await response.json()).message);
  } catch {
    return new Refused(`The server answered ${response.status}. It may be busy or stopped; try again.`);
  }
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is `tensorlens explore` still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function getJson(path) {
  return (await reach(path, {})).json();
}

export async function uploadImage(file) {
  const response = await reach("/api/images", { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } });
  return (await response.json()).image;
}

// Ask, receive every event, and return the last one.
export async function ask(path, question, { signal, hear = () => {} } = {}) {
  const headers = { "content-type": "application/json" };
  const response = await reach(path, { method: "POST", headers, body: JSON.stringify(question), signal });
  for await (const event of lines(response.body)) {
    if (event.type === "error") throw new Refused(event.message);
    if (event.type === "done") return event;
    hear(event);
  }
  throw new Refused("The answer was cut off. Is `tensorlens explore` still running?");
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = value.split("\n");
    if (parts.length === 1) {
      rest.push(value);
      continue;
    }
    yield JSON.parse(rest.join("") + parts[0]);
    for (const part of parts.slice(1, -1)) yield JSON.parse(part);
    rest = [parts.at(-1)];
  }
}
