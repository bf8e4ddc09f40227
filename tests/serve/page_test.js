// Run by test_page.py in a folder with the page's scripts and answers of the service.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { byId, sources, until } from "./page_dom.js";

const { openapi, refusal, queued, running, events, completed } = JSON.parse(readFileSync("answers.json"));
const bodies = [];
let stream = null, openJobs = [];

globalThis.fetch = async (path, options = {}) => {
  const json = (value, status = 200) => new Response(JSON.stringify(value), { status });
  assert.match(path, /^(v1\/|health$|openapi.json$)/); // relative, for proxies with a path
  if (path === "health") return json({ status: "ok", queued: 0 });
  if (path === "openapi.json") return json(openapi);
  if (path === "v1/videos/" + queued.id) return json(completed);
  if (path.endsWith("/events")) return new Response(new ReadableStream({ start(c) { stream = c; } }));
  if (options.method === "POST") {
    bodies.push(JSON.parse(options.body));
    if (bodies.at(-1).n === "11") return json(refusal, 400);
    openJobs = [running];
    return json(queued);
  }
  return json({ data: path.includes("queued") ? openJobs : [], has_more: false, last_id: null });
};
const stored = { fields: { prompt: "typed before a reload", guider: "apg" }, files: ["src_video"], count: "3" };
sessionStorage.setItem("form", JSON.stringify(stored));
await import("./page.js");
await until(() => byId("usual").children.length);

// An error of the API is shown; then a request for two videos is sent.
const find = (name) =>
  byId("usual").querySelectorAll("input, textarea").find((input) => input.id === "field-" + name);
const submit = () => byId("form").dispatchEvent(new Event("submit", { cancelable: true }));
await until(() => byId("count").value === "3"); // the form of before a reload, with open settings
assert.equal(find("prompt").value, stored.fields.prompt);
assert.equal(byId("rest").parentElement.open, true);
assert.match(byId("message").textContent, /Source video/);
assert.match(byId("usual").children[0].text, /Prompt .*needed/);
assert.deepEqual([find("prompt").required, find("src_video").required], [true, false]);
assert.equal(byId("random").hidden, true);
byId("form").dispatchEvent(new Event("reset", { cancelable: true }));
assert.equal(find("prompt").value, "");
find("prompt").value = queued.prompt;
byId("form").dispatchEvent(new Event("input"));
assert.equal(JSON.parse(sessionStorage.getItem("form")).fields.prompt, queued.prompt);
byId("count").value = "11";
submit();
await until(() => byId("message").textContent === refusal.error.message);
byId("count").value = "2";
find("seed").value = "70001";
submit();
await until(() => byId("videos").children.length);
assert.deepEqual(bodies[1], { prompt: queued.prompt, seed: "70001", n: "2" });
const card = byId("videos").children[0];
assert.match(card.text, /0 of 2 videos · .* · seeds 70001, 70002/);

// Its progress comes from the stream of events, in pieces of any size.
await until(() => stream);
const bytes = new TextEncoder().encode(events);
for (let first = 0; first < bytes.length; first += 7) stream.enqueue(bytes.slice(first, first + 7));
const numbers = () => card.querySelectorAll("button").filter((item) => /^[12]$/.test(item.textContent));
await until(() => card.text.includes("step 3 of 4"));
assert.deepEqual(numbers().map((item) => item.disabled), [true, true]);
openJobs = [];
stream.enqueue(new TextEncoder().encode(`id: 9\nevent: end\ndata: ${JSON.stringify(completed)}\n\n`));
stream.close();

// Each of its videos can be chosen.
await until(() => card.text.includes("2 videos"));
assert.deepEqual(numbers().map((item) => item.disabled), [false, false]);
numbers()[1].click();
assert.equal("/" + sources.at(-1), completed.data[1].url + "&variant=thumbnail");

// Two of its videos can be compared, each once.
const [compared] = card.querySelectorAll("input");
compared.checked = true;
compared.onchange();
compared.onchange();
numbers()[0].click();
assert.deepEqual([byId("compare").disabled, compared.checked], [true, false]);
compared.checked = true;
compared.onchange();
assert.equal(byId("compare").disabled, false);

// All of them can be downloaded.
const download = card.querySelectorAll("button").find((item) => item.textContent === "Download all");
const before = sources.length;
assert.equal(download.hidden, false);
download.click();
await until(() => sources.length >= before + 2);
assert.deepEqual(sources.slice(before).map((path) => "/" + path), completed.data.map((output) => output.url));

// Used again, its seeds are those of the form, which asks for no other number of videos.
card.querySelectorAll("button").find((item) => item.textContent === "Use again").click();
await until(() => byId("count").value === "1");
assert.equal(find("seed").value, "70001,70002");

// A search finds each of its seeds, also in a video that another client requests meanwhile.
byId("search").value = "70002";
byId("search").oninput();
await until(() => !byId("videos").children.length);
openJobs = [running];
await until(() => byId("videos").children.length);
process.exit(0);
