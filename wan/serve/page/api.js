// Requests to the service. The key of the API is stored until the tab is closed.

const folder = new URL(".", document.baseURI).pathname;

/** Returns the name of a stored item; services below other paths of a host have other items. */
export const storedName = (name) => `${name} of ${folder}`;

export class ApiError extends Error {
  constructor(message, status, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let key = sessionStorage.getItem(storedName("key")) || "";

export function setKey(value) {
  key = value;
  sessionStorage.setItem(storedName("key"), value);
}

export function getKey() {
  return key;
}

/** Returns the response to a request; throws an ApiError with the API's own sentence. */
export async function send(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: "Bearer " + key } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new ApiError("The service does not answer.", 0, null);
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    const error = body?.error || { message: "HTTP " + answer.status };
    throw new ApiError(error.message, answer.status, error.param);
  }
  return answer;
}

/** Parses JSON. Seeds beyond the exact numbers of JavaScript become text. */
function parse(text) {
  return JSON.parse(text, (name, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && Number.isInteger(value)
      ? context?.source ?? value : value);
}

/** Returns the JSON of a response. */
export async function getJson(path, options) {
  return parse(await (await send(path, options)).text());
}

/** Calls a function with kind and data of each server-sent event, until the stream ends. */
export async function readEvents(path, handle) {
  const answer = await send(path);
  if (!answer.body) return; // 204: it has ended before
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (text + part.value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const event = Object.fromEntries(block.split("\n").map((line) => line.split(/:\s?(.*)/s, 2)));
      if (event.event) handle(event.event, parse(event.data));
    }
  }
}

/** Sends a request that makes a video; repeats it with the same key if the connection is lost. */
export async function create(path, body) {
  const random = [...crypto.getRandomValues(new Uint8Array(16))];
  const headers = { "Idempotency-Key": random.map((byte) => byte.toString(16)).join("-") };
  if (typeof body === "string") headers["Content-Type"] = "application/json";
  for (let attempt = 0; ; attempt++) {
    try {
      return await getJson(path, { method: "POST", headers, body });
    } catch (error) {
      if (error.status !== 0 || attempt === 2) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000 << attempt));
    }
  }
}

/** Sets the source of an image or video; with a key, which elements cannot send, by a blob. */
export async function setSource(element, path) {
  if (!key) {
    element.src = path;
    return;
  }
  element.src = URL.createObjectURL(await (await send(path)).blob());
}

/** Plays an mp4 as it comes; as its `src`, browsers would wait for more than 20 frames. */
export async function playStream(player, path) {
  const reader = (await send(path)).body.getReader(), source = new MediaSource();
  player.src = URL.createObjectURL(source);
  await new Promise((done) => { source.onsourceopen = done; });
  try {
    let buffer = null, bytes = [];
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      bytes = buffer ? part.value : new Uint8Array([...bytes, ...part.value]);
      const start = buffer ? 0 : new TextDecoder("latin1").decode(bytes).indexOf("avcC");
      if (start < 0) continue; // the header is not complete
      const profile = [...bytes.slice(start + 5, start + 8)].map((x) => x.toString(16).padStart(2, "0"));
      buffer ??= source.addSourceBuffer(`video/mp4; codecs="avc1.${profile.join("")}"`);
      buffer.appendBuffer(bytes);
      await new Promise((done) => { buffer.onupdateend = done; });
    }
  } finally {
    if (source.readyState === "open") source.endOfStream();
  }
}

/** Frees the blob of an element. */
export function freeSource(element) {
  if (element.src.startsWith("blob:")) URL.revokeObjectURL(element.src);
}

/** Returns the body of a request with fields and files, by field. */
export function makeBody(fields, files) {
  if (!Object.keys(files).length) return JSON.stringify(fields);
  const form = new FormData();
  form.append("extra_body", JSON.stringify(fields));
  for (const [name, list] of Object.entries(files)) {
    for (const file of list) form.append(name, file, file.name);
  }
  return form;
}

/** Returns the name in a Content-Disposition header; "" without one. */
function readFileName(answer) {
  const header = answer.headers.get("Content-Disposition") || "";
  const [, encoded, plain] = header.match(/filename\*=utf-8''([^;]+)|filename="([^"]*)"/i) || [];
  return encoded ? decodeURIComponent(encoded) : plain || "";
}

/** Returns the uploaded files of a video, by field. */
export async function fetchInputs(video) {
  const files = {};
  for (const [field, count] of Object.entries(video.inputs || {})) {
    files[field] = [];
    for (let index = 0; index < count; index++) {
      const path = `v1/videos/${video.id}/inputs/${field}?index=${index}`;
      const answer = await send(path);
      files[field].push(new File([await answer.blob()], readFileName(answer) || field));
    }
  }
  return files;
}
