// Run by test_page.py in a folder with the page's files and answers of the service.

import assert from "node:assert/strict";
import { cpSync, readFileSync } from "node:fs";
import { Worker, isMainThread, parentPort, threadId, workerData } from "node:worker_threads";
import { byId, openDocument, page, until } from "./page_dom.js";

const { openapi, refusal, queued, running, events, completed } = JSON.parse(readFileSync("answers.json"));
const html = readFileSync("page/page.html", "utf8");
const FORM = "form of /wan/", KEY = "key of /wan/"; // stored items
let numPages = 0, service;

const json = (value, status = 200) => new Response(JSON.stringify(value), { status });
const isOpen = (video) => ["queued", "in_progress"].includes(video.status);
const copy = (value) => JSON.parse(JSON.stringify(value));
const pause = (milliseconds) => new Promise((done) => { AbortSignal.timeout(milliseconds).onabort = done; });

/** Answers the requests of a page; `videos` are the newest first. */
class Service {
  videos = []; openapi = copy(openapi); loras = []; inputs = {}; key = "";
  creations = []; // requests that make a video: path, key, body
  answers = []; // to the next of them: "lost", "late" or a response; then videos are made
  deletions = []; listings = []; streams = []; headers = [];
  page = null; // in place of a page of the list
  hasStreams = true;

  async fetch(path, options) {
    assert.match(path, /^(v1\/|health$|openapi.json$)/); // relative, for proxies with a path
    if (path === "health") return json({ status: "ok", queued: this.videos.length });
    if (this.held && path.includes("limit=100")) {
      this.isHolding = true;
      await this.held;
    }
    this.headers.push(options.headers.Authorization);
    if (this.key && options.headers.Authorization !== "Bearer " + this.key) {
      return json({ error: { message: "A key is needed.", param: null } }, 401);
    }
    if (path === "openapi.json") return json(this.openapi);
    if (path === "v1/loras") return json({ data: this.loras });
    if (options.method === "POST") return this.create(path, options);
    const [, id, , rest] = path.match(/^v1\/videos\/([^/?]+)(\/(.*))?$/) ?? [];
    if (!id) return json(this.list(new URLSearchParams(path.split("?")[1])));
    const video = this.videos.find((other) => other.id === id);
    if (options.method === "DELETE") {
      this.deletions.push(id);
      this.videos = this.videos.filter((other) => other !== video);
      return json({ deleted: true });
    }
    if (!video) return json({ error: { message: "There is no such video.", param: null } }, 404);
    if (!rest) return json(video);
    if (id === this.gone) return json({ error: { message: "Gone.", param: null } }, 404);
    if (rest.startsWith("content")) return new Response("content of " + path);
    if (rest.startsWith("inputs")) return this.inputs[rest]();
    if (!this.hasStreams) return json({ error: { message: "Busy.", param: null } }, 503);
    return new Response(new ReadableStream({ start: (stream) => { this.streams.push({ id, stream }); } }));
  }

  /** Lets polls wait, so that only events change what is shown; returns once one waits. */
  async holdPolls() {
    this.held = new Promise((done) => { this.releasePolls = done; });
    this.isHolding = false;
    await until(() => this.isHolding);
  }

  async create(path, options) {
    const key = options.headers["Idempotency-Key"];
    this.creations.push({ path, key, body: options.body, type: options.headers["Content-Type"] });
    const answer = this.answers.shift();
    if (answer === "lost") throw new TypeError("fetch failed");
    if (answer) return answer;
    this.videos.unshift({ ...copy(queued), id: `new-${this.creations.length}`, created_at: 9e9 + this.creations.length });
    return json(this.videos[0]);
  }

  list(query) {
    this.listings.push(Object.fromEntries(query));
    if (this.page && query.get("limit") !== "100") return this.page(query);
    const states = query.get("status") ? query.get("status").split(",") : null;
    const fitting = this.videos.filter((video) => !states || states.includes(video.status))
      .filter((video) => !query.get("search") || video.prompt.includes(query.get("search")));
    const first = query.get("after") ? fitting.findIndex((video) => video.id === query.get("after")) + 1 : 0;
    const data = fitting.slice(first, first + Number(query.get("limit")));
    return { data, has_more: first + data.length < fitting.length, last_id: data.at(-1)?.id ?? null };
  }
}

globalThis.fetch = async (path, options = {}) => service.fetch(path, { headers: {}, ...options });

/** Opens the page with videos; a reload has the stored items of before. */
async function open(videos = [], { stored = {}, isBuilt = true, ...values } = {}) {
  service = Object.assign(new Service(), { videos: [...videos] }, values);
  openDocument(html, stored);
  const folder = `page-${threadId}-${++numPages}`; // another one for each page, as modules run once
  cpSync("page", folder, { recursive: true });
  await import(`./${folder}/page.js`);
  if (isBuilt) await until(() => !byId("form").hidden && service.listings.length > 1);
}

const make = (index, values = {}) =>
  ({ ...copy(completed), id: `video-${index}`, prompt: `prompt ${index}`, created_at: 1000 + index, ...values });
const cards = () => byId("videos").children;
const cardOf = (prompt) => cards().find((card) => card.text.includes(prompt));
const button = (parent, text) => parent.find((node) => node.tagName === "BUTTON" && node.textContent === text);
const field = (name) => byId("field-" + name);
const submit = () => byId("generate").click();
const lastBody = () => JSON.parse(service.creations.at(-1).body);

function type(node, value) {
  node.value = value;
  node.fire("input");
}

function check(node, isChecked) {
  node.checked = isChecked;
  node.fire("change");
}

const tests = {
  async "several videos of a request"() {
    const fields = { prompt: "typed before a reload", guider: "apg" };
    const stored = { [FORM]: JSON.stringify({ fields, files: { src_video: ["a.mp4"] }, count: "3" }) };
    await open([], { stored });
    // The form of before a reload, with open settings.
    assert.deepEqual([byId("count").value, field("prompt").value], ["3", fields.prompt]);
    assert.equal(byId("more").open, true);
    assert.match(byId("message").textContent, /Source video \(a\.mp4\)/);
    assert.match(byId("usual").children[0].text, /Prompt .*needed/);
    assert.deepEqual([field("prompt").required, field("src_video").required], [true, false]);
    assert.equal(byId("random").hidden, true);
    button(byId("form"), "Clear").click();
    assert.deepEqual([field("prompt").value, byId("count").value], ["", "1"]);
    assert.deepEqual(JSON.parse(localStorage.getItem(FORM)), { fields: {}, files: {}, count: "1" });
    type(field("prompt"), queued.prompt);
    assert.equal(JSON.parse(localStorage.getItem(FORM)).fields.prompt, queued.prompt);
    // An error of the API is shown; then a request for two videos is sent.
    byId("count").value = "11";
    service.answers = [json(refusal, 400), json(queued)];
    submit();
    await until(() => byId("message").textContent === refusal.error.message);
    byId("count").value = "2";
    type(field("seed"), "70001");
    service.videos = [running];
    submit();
    await until(() => cards().length);
    assert.deepEqual(lastBody(), { prompt: queued.prompt, seed: "70001", n: "2" });
    const card = cards()[0];
    assert.match(card.text, /0 of 2 videos · .* · seeds 70001, 70002/);
    // Its progress comes from the stream of events, in pieces of any size.
    await until(() => service.streams.length);
    await service.holdPolls();
    const { stream } = service.streams[0], bytes = new TextEncoder().encode(events);
    for (let first = 0; first < bytes.length; first += 7) stream.enqueue(bytes.slice(first, first + 7));
    const numbers = () => ["1", "2"].map((text) => button(card, text));
    await until(() => card.text.includes("step 3 of 4"));
    assert.deepEqual(numbers().map((item) => item.disabled), [true, true]);
    service.videos = [completed];
    service.releasePolls();
    stream.enqueue(new TextEncoder().encode(`id: 9\nevent: end\ndata: ${JSON.stringify(completed)}\n\n`));
    stream.close();
    // Each of its videos can be chosen.
    await until(() => card.text.includes("2 videos"));
    assert.deepEqual(numbers().map((item) => item.disabled), [false, false]);
    numbers()[1].click();
    assert.equal("/" + page.sources.at(-1), completed.data[1].url + "&variant=thumbnail");
    // Two of its videos can be compared, each once.
    const compared = card.find((node) => node.type === "checkbox");
    check(compared, true);
    check(compared, true);
    numbers()[0].click();
    assert.deepEqual([byId("compare").disabled, compared.checked], [true, false]);
    check(compared, true);
    assert.equal(byId("compare").disabled, false);
    // Used again, its seeds are those of the form, which asks for no other number of videos.
    button(card, "Use again").click();
    await until(() => byId("count").value === "1");
    assert.equal(field("seed").value, "70001,70002");
    // A search finds each of its seeds, also in a video that another client requests meanwhile.
    service.videos = [];
    type(byId("search"), "70002");
    await until(() => !cards().length);
    service.videos = [running];
    service.page = () => ({ data: [], has_more: false, last_id: null });
    service.videos = [running, { ...running, id: "other", prompt: "70003", data: [] }];
    const { length } = service.listings;
    await until(() => service.listings.length > length + 1);
    assert.deepEqual([cards().length, cards()[0].text.includes("70002")], [1, true]);
  },

  async "one key for all attempts of a creation"() {
    await open([make(1, { status: "failed", request: { prompt: "p", seed: 5 } })]);
    type(field("prompt"), "a star");
    service.answers = ["lost", "lost"];
    submit();
    byId("form").fire("submit"); // by a key, too
    await until(() => service.creations.length === 3 && cards().length === 2);
    const keys = () => service.creations.map((request) => request.key);
    assert.equal(new Set(keys()).size, 1);
    assert.equal(new Set(service.creations.map((request) => request.body)).size, 1);
    assert.ok(keys()[0].length > 20);
    service.creations = [];
    service.answers = ["lost", "lost", "lost"];
    submit(); // another video: another key; after three attempts it is left to the user
    await until(() => byId("message").textContent);
    assert.match(byId("message").textContent, /does not answer/);
    assert.deepEqual([keys().length, new Set(keys()).size], [3, 1]);
    service.answers = [json(refusal, 503)]; // an answer is no lost connection
    submit();
    await until(() => byId("message").textContent === refusal.error.message);
    submit();
    await until(() => cards().length === 3);
    assert.deepEqual([keys().length, new Set(keys()).size], [5, 3]);
    assert.deepEqual(service.creations.map((request) => request.type), Array(5).fill("application/json"));
    // The same of a retry and of a remix.
    service.creations = [];
    service.answers = ["lost"];
    button(cardOf("prompt 1"), "Retry").click();
    await until(() => cards().length === 4);
    assert.deepEqual([keys().length, new Set(keys()).size], [2, 1]);
    assert.deepEqual(lastBody(), { prompt: "p", seed: 5 });
    service.creations = [];
    service.answers = [json(refusal, 400), "lost"];
    button(cardOf("prompt 1"), "Remix").click();
    const remix = byId("remix"), area = remix.querySelector("textarea");
    assert.deepEqual([remix.open, area.value], [true, "prompt 1"]);
    area.value = "another";
    button(remix, "Remix").click();
    await until(() => remix.text.includes(refusal.error.message));
    button(remix, "Remix").click();
    await until(() => !remix.open);
    assert.deepEqual(service.creations.map((request) => request.path), Array(3).fill("v1/videos/video-1/remix"));
    assert.deepEqual([new Set(keys()).size, lastBody()], [2, { prompt: "another" }]);
    button(cardOf("prompt 1"), "Remix").click();
    button(remix, "Cancel").click();
    assert.deepEqual([remix.open, service.creations.length], [false, 3]);
  },

  async "pages of older videos"() {
    const videos = Array.from({ length: 60 }, (_, index) => make(60 - index));
    await open(videos);
    const prompts = () => cards().map((card) => card.text.match(/prompt \d+/)[0]);
    const expect = (count) => assert.deepEqual(prompts(), videos.slice(0, count).map((video) => video.prompt));
    await until(() => cards().length);
    expect(24);
    assert.equal(service.listings.filter((query) => query.limit !== "100").length, 1);
    for (const count of [48, 60]) {
      assert.equal(byId("older").hidden, false);
      byId("older").click();
      await until(() => cards().length >= count);
      expect(count);
    }
    assert.equal(byId("older").hidden, true);
    // A page of a filtered list may have fewer videos than it may, or none, though others are left.
    let parts = [5, 0, 10, 9, 3];
    const found = videos.slice(10, 40);
    let first = 0;
    service.listings = [];
    service.page = (query) => {
      if (!query.get("after")) first = 0;
      const data = found.slice(first, first + Math.min(parts.shift() ?? 0, query.get("limit")));
      first += data.length;
      return { data, has_more: first < 27, last_id: `after-${first}` };
    };
    byId("status").value = "completed";
    byId("status").fire("change");
    await until(() => prompts()[0] === found[0].prompt);
    assert.deepEqual(prompts(), found.slice(0, 24).map((video) => video.prompt));
    const queries = () => service.listings.filter((query) => query.limit !== "100");
    assert.deepEqual(queries().map((query) => [query.limit, query.after]),
      [["24", undefined], ["19", "after-5"], ["19", "after-5"], ["9", "after-15"]]);
    assert.deepEqual(queries().map((query) => query.status), Array(4).fill("completed"));
    byId("older").click();
    await until(() => cards().length === 27);
    assert.deepEqual([queries()[4].after, byId("older").hidden], ["after-24", true]);
    // Where nothing is found, the search ends for now, and can go on.
    service.listings = [];
    service.page = () => ({ data: [], has_more: true, last_id: "far" });
    byId("status").value = "failed";
    byId("status").fire("change");
    await until(() => !cards().length && !byId("older").hidden);
    assert.deepEqual([queries().length, byId("empty").hidden], [10, false]);
    // The answer to an earlier search that comes late is not shown.
    const answers = [];
    service.page = (query) => new Promise((done) => { answers.push([query.get("search"), done]); });
    service.list = (query) => service.page(query);
    const fetchNow = service.fetch.bind(service);
    service.fetch = async (path, options) => {
      if (!path.startsWith("v1/videos?") || path.includes("limit=100")) return fetchNow(path, options);
      return json(await service.page(new URLSearchParams(path.split("?")[1])));
    };
    byId("status").value = "";
    for (const word of ["old", "new"]) {
      type(byId("search"), word);
      await until(() => answers.some(([search]) => search === word));
    }
    const answer = (word, video) =>
      answers.find(([search]) => search === word)[1]({ data: [video], has_more: false, last_id: video.id });
    answer("new", make(1, { prompt: "of the new search" }));
    await until(() => cards().length === 1);
    answer("old", make(2, { prompt: "of the old search" }));
    await pause(20);
    assert.deepEqual([cards().length, cardOf("of the old search")], [1, undefined]);
  },

  async "switches and other fields"() {
    const on = copy(openapi), properties = on.components.schemas.VideoRequest.properties;
    properties.refine.default = true;
    properties.preview.default = 4;
    properties.notes = { title: "Notes", type: "array", items: { type: "string" } };
    properties.lora = { title: "LoRA", type: "array" };
    Object.assign(on.components.schemas.VideoRequest, { if: { required: ["ode"] }, then: { required: ["num_frames"] } });
    await open([], { openapi: on, loras: [{ name: "style" }, { name: "broken", error: "x" }, { name: "fast" }] });
    const send = async () => {
      const count = service.creations.length;
      submit();
      await until(() => service.creations.length > count && !byId("generate").disabled);
      const { prompt, ...fields } = lastBody();
      assert.equal(prompt, "a star");
      return fields;
    };
    assert.match(field("num_frames").parentElement.text, /^Frames \(needed with ODE\)/);
    assert.equal(field("num_frames").required, false);
    type(field("prompt"), "a star");
    const names = ["refine", "preview", "ode"];
    assert.deepEqual(names.map((name) => field(name).checked), [true, true, false]);
    assert.deepEqual(await send(), {});
    for (const name of names) check(field(name), !field(name).checked);
    assert.deepEqual(await send(), { refine: false, preview: false, ode: true });
    const stored = { [FORM]: localStorage.getItem(FORM) };
    button(byId("form"), "Clear").click();
    assert.deepEqual(names.map((name) => field(name).checked), [true, true, false]);
    // Texts are sent as typed, lists by line; choices and fields that are empty are as started.
    for (const [name, value] of [["prompt", "a star"], ["notes", "one\n\n two\n"], ["sample_solver", "euler"]]) {
      type(field(name), value);
    }
    type(field("num_frames"), "  ");
    assert.deepEqual(await send(), { notes: ["one", " two"], sample_solver: "euler" });
    type(field("sample_solver"), "");
    type(field("notes"), "");
    const rows = byId("field-lora").children;
    assert.deepEqual(rows.map((row) => row.text), ["style", "fast"]);
    check(rows[1].find((node) => node.type === "checkbox"), true);
    type(rows[1].children[1], "0.5");
    assert.deepEqual(await send(), { lora: [{ name: "fast", scale: 0.5 }] });
    await open([], { openapi: on, stored });
    assert.deepEqual(names.map((name) => field(name).checked), [false, false, true]);
    assert.equal(field("prompt").value, "a star");
  },

  async "an error is at its field"() {
    await open();
    const fail = async (param) => {
      service.answers = [json({ error: { message: "Too large.", param } }, 400)];
      submit();
      await until(() => !byId("generate").disabled);
    };
    await fail("frame_num"); // another name of num_frames
    assert.equal(byId("wrong-num_frames").textContent, "Too large.");
    assert.deepEqual([field("num_frames").getAttribute("aria-invalid"), byId("message").textContent], ["true", ""]);
    assert.deepEqual([document.activeElement.id, byId("more").open], ["field-num_frames", false]);
    type(field("num_frames"), "5");
    assert.equal(field("num_frames").getAttribute("aria-invalid"), null);
    await fail("num_frames");
    await fail("flow_shift");
    assert.deepEqual([byId("wrong-num_frames").textContent, byId("more").open], ["", true]);
    await fail("nothing");
    assert.deepEqual([byId("wrong-flow_shift").textContent, byId("message").textContent], ["", "Too large."]);
  },

  async "a request is used again, with its files"() {
    const request = { prompt: "again", ode: "yes", flow_shift: 3, seed: [7, 3], webhook_url: "http://x", odd: 1, n: 2 };
    const input_names = { src_video: ["a stär.mp4"], pictures: ["one.png", null] };
    const video = make(1, { request, inputs: { src_video: 1, pictures: 2 }, input_names });
    const some = copy(openapi), properties = some.components.schemas.VideoRequest.properties;
    properties.pictures = { title: "Pictures", "x-media": "image/*", anyOf: [{ type: "array" }] };
    const send = (text, name) => () =>
      new Response(text, { headers: name ? { "Content-Disposition": name } : {} });
    await open([video], { openapi: some, inputs: {
      "inputs/src_video?index=0": send("moves", "attachment; filename*=utf-8''a%20st%C3%A4r.mp4"),
      "inputs/pictures?index=0": send("first", 'inline; filename="one.png"'),
      "inputs/pictures?index=1": send("second"),
    } });
    for (const [name, value] of [["negative_prompt", "of before"], ["num_frames", "9"]]) type(field(name), value);
    byId("count").value = "4";
    button(cards()[0], "Use again").click();
    await until(() => field("prompt").value === "again");
    assert.deepEqual([field("negative_prompt").value, field("num_frames").value], ["", ""]);
    assert.match(cards()[0].text, /from a stär\.mp4, one\.png ·/);
    assert.match(field("pictures").parentElement.text, /one\.png, pictures/);
    assert.deepEqual([field("ode").checked, field("flow_shift").value, byId("more").open], [true, "3", true]);
    assert.match(byId("message").textContent, /: odd\.$/); // fields that the form lacks
    const { fields, files, count } = JSON.parse(localStorage.getItem(FORM));
    assert.deepEqual([fields.prompt, files, count], ["again", { src_video: ["a stär.mp4"], pictures: ["one.png", "pictures"] }, "1"]);
    submit();
    await until(() => service.creations.length);
    const body = service.creations[0].body;
    assert.deepEqual(JSON.parse(body.get("extra_body")),
      { prompt: "again", ode: true, flow_shift: "3", seed: "7,3" });
    const read = async (name) =>
      Promise.all(body.getAll(name).map(async (file) => [file.name, await file.text()]));
    assert.deepEqual(await read("src_video"), [["a stär.mp4", "moves"]]);
    assert.deepEqual(await read("pictures"), [["one.png", "first"], ["pictures", "second"]]);
    assert.equal(service.creations[0].type, undefined); // with the boundary of the form
    await until(() => !byId("generate").disabled);
    const numBlobs = page.blobs.size;
    button(field("pictures").parentElement, "Remove").click();
    assert.equal(page.blobs.size, numBlobs - 2);
    submit();
    await until(() => service.creations.length === 2 && !byId("generate").disabled);
    assert.deepEqual([...service.creations[1].body.keys()], ["extra_body", "src_video"]);
    button(byId("form"), "Clear").click();
    type(field("prompt"), "without files");
    submit();
    await until(() => service.creations.length === 3);
    assert.deepEqual(lastBody(), { prompt: "without files" });
  },

  async "a service with a key"() {
    await open([make(1), make(2)], { key: "secret", isBuilt: false });
    await until(() => !byId("keyed").hidden);
    assert.deepEqual([byId("form").hidden, cards().length], [true, 0]);
    assert.match(byId("state").textContent, /key is needed/);
    byId("key").value = "secret";
    byId("key").fire("change");
    service.headers = [];
    await until(() => page.sources.length === 2);
    assert.deepEqual([byId("form").hidden, byId("keyed").hidden], [false, true]);
    assert.deepEqual(new Set(service.headers), new Set(["Bearer secret"]));
    assert.deepEqual(page.sources.map((path) => path.slice(0, 5)), ["blob:", "blob:"]); // elements send no key
    const texts = await Promise.all(page.sources.map((path) => page.blobs.get(path).text()));
    const expected = [1, 2].map((index) => `content of v1/videos/video-${index}/content?index=0&variant=thumbnail`);
    assert.deepEqual(texts.sort(), expected);
    assert.equal(sessionStorage.getItem(KEY), "secret");
    await until(() => cardOf("prompt 1").querySelector("img"));
    button(cardOf("prompt 1"), "Delete").click();
    await until(() => cards().length === 1);
    assert.equal(page.blobs.size, 1);
  },

  async "two videos are compared"() {
    const first = make(1, { request: { prompt: "x", flow_shift: 3 } });
    const second = make(2, { num_frames: 9, request: { prompt: "x" } });
    await open([second, first], { key: "secret", stored: { [KEY]: "secret" } }); // players have blobs
    await until(() => cards().length === 2);
    const picks = cards().map((card) => card.find((node) => node.type === "checkbox"));
    const isReady = () => !byId("compare").disabled;
    check(picks[1], true);
    assert.equal(isReady(), false);
    check(picks[0], true);
    assert.equal(isReady(), true);
    check(picks[0], false);
    assert.equal(isReady(), false);
    check(picks[0], true);
    button(cards()[0], "2").click();
    check(picks[0], true); // a third one
    assert.deepEqual([isReady(), byId("compare").textContent], [false, "Choose two"]);
    check(picks[0], false);
    button(cards()[0], "1").click();
    check(picks[0], false);
    button(cards()[0], "2").click();
    check(picks[0], true);
    byId("compare").click();
    const dialog = byId("comparison");
    const players = () => dialog.querySelectorAll("video");
    await until(() => players().length === 2 && players().every((player) => !player.paused));
    const shown = await Promise.all(players().map((player) => page.blobs.get(player.src).text()));
    assert.deepEqual(shown, ["1/content?index=0", "2/content?index=1"].map((end) => "content of v1/videos/video-" + end));
    assert.deepEqual(dialog.querySelectorAll("select").map((choice) => choice.value), ["0", "1"]);
    const rows = dialog.querySelectorAll("tr").map((row) => row.children.map((cell) => cell.textContent));
    assert.deepEqual(rows, [["num frames", String(first.num_frames), "9"],
      ["flow shift", "3", "as started"], ["seed", "70001", "70002"]]);
    // Both show the same time; the shorter one stays at its end.
    const [short, long] = players();
    Object.assign(short, { duration: 1 });
    Object.assign(long, { duration: 2 });
    const slider = dialog.querySelector("[type=range]");
    type(slider, "1.5");
    assert.deepEqual([short.currentTime, long.currentTime, short.paused, long.paused], [1, 1.5, true, true]);
    await until(() => slider.max === 2);
    const press = (what) => dialog.find((node) => node.dataset.do === what).click();
    press("next");
    assert.equal(long.currentTime, 1.5 + 1 / first.fps);
    press("back");
    press("back");
    assert.equal(long.currentTime, 1.5 - 1 / first.fps);
    type(slider, "0.5");
    press("play");
    assert.deepEqual([short.paused, long.paused], [false, false]);
    short.currentTime = 0.1; // late: it is set to the time of the longer one
    await until(() => short.currentTime === 0.5);
    short.currentTime = 0.4; // a bit late: it plays faster
    await until(() => short.playbackRate > 1.2);
    long.ended = true; // both begin again
    await until(() => short.currentTime === 0 && long.currentTime === 0);
    press("close");
    assert.deepEqual([dialog.open, short.paused, long.paused], [false, true, true]);
    assert.deepEqual([...page.blobs.keys()], cards().map((card) => card.querySelector("img").src));
    // A video that is deleted cannot be compared.
    button(cardOf("prompt 1"), "Delete").click();
    await until(() => cards().length === 1);
    assert.equal(isReady(), false);
  },

  async "the seeds of a request are compared"() {
    const video = make(1);
    video.data.push({ ...video.data[1], index: 2, seed: 5 }, { ...video.data[1], index: 3, status: "failed" });
    const single = make(2);
    single.data[1].status = "failed";
    await open([video, single]);
    await until(() => cards().length === 2);
    assert.equal(button(cardOf("prompt 2"), "Compare seeds").hidden, true); // one is complete
    const dialog = byId("comparison"), players = () => dialog.querySelectorAll("video");
    const path = (index) => `v1/videos/video-1/content?index=${index}`;
    const compare = async (first, second) => {
      button(cardOf("prompt 1"), "Compare seeds").click();
      await until(() => players().length === 2 && players().every((player) => !player.paused));
      assert.deepEqual(players().map((player) => player.src), [path(first), path(second)]);
    };
    const listRows = () =>
      dialog.querySelectorAll("tr").map((row) => row.children.map((cell) => cell.textContent));
    button(cardOf("prompt 1"), "3").click(); // the shown one and the next one
    await compare(2, 0);
    button(dialog, "Close").click();
    button(cardOf("prompt 1"), "1").click();
    await compare(0, 1);
    assert.deepEqual(listRows(), [["seed", "70001", "70002"]]);
    const choices = dialog.querySelectorAll("select");
    assert.deepEqual(choices.map((choice) => choice.children.map((option) => option.textContent)),
      Array(2).fill(["70001", "70002", "5"]));
    assert.deepEqual(choices.map((choice) => choice.value), ["0", "1"]);
    // Another seed takes the place of the second one, and is at the time of the first one.
    choices[1].value = "2";
    choices[1].fire("change");
    await until(() => players()[1].src === path(2));
    assert.deepEqual(listRows(), [["seed", "70001", "5"]]);
    for (const player of players()) player.duration = 2;
    players()[1].paused = true; // as another source is
    players()[1].fire("loadeddata");
    assert.equal(players()[1].paused, false);
    type(dialog.querySelector("[type=range]"), "1.5"); // pauses
    players()[1].currentTime = 0;
    players()[1].fire("loadeddata");
    assert.deepEqual([players()[1].currentTime, players()[1].paused], [1.5, true]);
    assert.equal(byId("compare").disabled, true); // what was chosen in the list stays
  },

  async "videos are downloaded"() {
    const video = make(1);
    video.data.push({ ...video.data[1], index: 2, seed: 5, status: "failed" });
    const single = make(2);
    single.data[1].status = "failed";
    await open([video, single]);
    await until(() => cards().length === 2);
    const names = video.data.map((output) => output.file_name);
    const path = (index) => `v1/videos/video-1/content?index=${index}`;
    const card = cardOf("prompt 1");
    button(card, "All files").click();
    await until(() => page.downloads.length === 1);
    assert.deepEqual(page.downloads, [["video-1.zip", "v1/videos/video-1/archive"]]);
    button(card, "2").click();
    button(card, "Download").click();
    await until(() => page.downloads.length === 2);
    assert.deepEqual(page.downloads[1], [names[1], path(1)]);
    button(card, "Copy seed").click();
    await until(() => page.copied.length);
    assert.deepEqual(page.copied, ["70002"]);
    button(card, "Full size").click();
    await until(() => byId("full").open);
    assert.equal(byId("full").querySelector("video").src, path(1));
    button(byId("full"), "Close").click();
    assert.deepEqual([byId("full").open, byId("full").querySelector("video").paused], [false, true]);
    await until(() => card.find((node) => node.attributes["aria-label"]?.startsWith("Play")));
    card.find((node) => node.attributes["aria-label"]?.startsWith("Play")).click();
    await until(() => card.querySelector("video"));
    assert.equal(card.querySelector("video").src, path(1));
    button(card, "3").click(); // it has failed and cannot be chosen
    assert.equal(button(card, "3").disabled, true);
  },

  async "a picture that fails is loaded again"() {
    page.broken.add("v1/videos/video-1/content?index=0&variant=thumbnail");
    await open([make(1)]);
    await until(() => cards()[0]?.querySelector("img"));
    assert.deepEqual(page.sources.map((path) => path.split("&").slice(2)), [[], ["retry=1"]]);
    // One that is gone is no longer shown.
    await open([make(1), make(2)], { key: "secret", stored: { [KEY]: "secret" }, gone: "video-1" });
    await until(() => cards().length === 1);
    assert.ok(cardOf("prompt 2"));
  },

  async "a video is cancelled or deleted"() {
    const active = { ...copy(running), id: "active", prompt: "an active one", created_at: 2000 };
    await open([active, make(1)]);
    await until(() => cards().length === 2);
    const card = cardOf("an active one");
    for (const name of ["Download", "All files", "Compare seeds", "Full size", "Retry"]) assert.ok(button(card, name).hidden, name);
    page.isConfirmed = false;
    button(card, "Cancel").click();
    await until(() => page.questions.length === 1 && !button(card, "Cancel").disabled);
    assert.deepEqual([service.deletions, cards().length], [[], 2]);
    page.isConfirmed = true;
    button(card, "Cancel").click();
    await until(() => cards().length === 1);
    assert.deepEqual([service.deletions, byId("empty").hidden], [["active"], true]);
    assert.match(page.questions[1], /^Cancel this video\?\s+an active one$/);
    button(cardOf("prompt 1"), "Delete").click();
    await until(() => !byId("empty").hidden);
    assert.deepEqual(service.deletions, ["active", "video-1"]);
    assert.match(page.questions[2], /^Delete this video and its files\?/);
  },

  async "polls and events"() {
    const active = (index, values = {}) => ({
      ...copy(running), id: `video-${index}`, prompt: `prompt ${index}.`, created_at: 1000 + index, ...values,
    });
    const waiting = Array.from({ length: 120 }, (_, index) =>
      active(200 - index, { status: "queued", queue_position: index }));
    const ended = Array.from({ length: 30 }, (_, index) => make(70 - index));
    await open([...waiting, ...ended, active(3)]);
    await until(() => cardOf("prompt 3."));
    // All unfinished videos are shown, also beyond the first page.
    assert.ok(cardOf("prompt 81."));
    const card = cardOf("prompt 3.");
    await until(() => {
      byId("older").click();
      return cardOf("prompt 41");
    });
    await until(() => service.streams.length);
    assert.equal(service.streams[0].id, "video-3");
    const send = (kind, data) => service.streams.at(-1).stream.enqueue(
      new TextEncoder().encode(`id: 1\nevent: ${kind}\ndata: ${JSON.stringify(data)}\n\n`));
    await service.holdPolls();
    send("stage", { status: "in_progress", stage: "loading", attempt: 2 });
    await until(() => card.text.includes("loading"));
    send("preview", { step: 1 });
    await until(() => card.querySelector("img"));
    assert.equal(page.sources.at(-1), "v1/videos/video-3/content?variant=preview&step=1");
    assert.equal(service.streams.length, 1);
    // It is deleted by another client; others were deleted or have ended, before the stream ends.
    send("end", { deleted: true });
    await until(() => !cardOf("prompt 3."));
    service.releasePolls();
    const error = { message: "No memory." };
    service.videos = service.videos.filter((video) => video.id !== "video-200")
      .map((video) => (video.id === "video-199" ? { ...video, status: "failed", error } : video));
    service.videos = service.videos.filter((video) => video.id !== "video-3");
    service.streams[0].stream.close();
    await until(() => !cardOf("prompt 200.") && cardOf("prompt 199.").text.includes("No memory."));
    assert.equal(button(cardOf("prompt 199."), "Retry").hidden, false);
    // What other clients make or delete among the newest videos is seen later.
    const others = service.videos.filter((video) => video.id !== "video-199");
    service.videos = [make(300), ...others];
    await until(() => cardOf("prompt 300") && !cardOf("prompt 199."));
    assert.equal(cards()[0], cardOf("prompt 300"));
    assert.ok(cardOf("prompt 41")); // older than the newest page, and not looked at
  },

  async "without a stream of events"() {
    await open([{ ...copy(running), id: "active" }], { hasStreams: false });
    await until(() => cards().length);
    let numTries = 0;
    const fetchNow = service.fetch.bind(service);
    service.fetch = (path, options) => {
      numTries += path.endsWith("/events");
      return fetchNow(path, options);
    };
    service.videos[0] = { ...service.videos[0], steps: [3, 4] };
    await until(() => cards()[0].text.includes("step 3 of 4"));
    const before = service.listings.length;
    await until(() => service.listings.length > before + 2);
    assert.ok(numTries <= 1, numTries); // it was refused, and is not tried for a minute
  },
};

/** Runs each test in a thread with its own page; returns what went wrong. */
async function runAll(names) {
  const failures = await Promise.all(names.map((name) => new Promise((done) => {
    const worker = new Worker(new URL(import.meta.url), { workerData: name });
    worker.on("message", done);
    worker.on("error", (error) => done(`${name}: ${error.stack}`));
  })));
  return failures.filter(Boolean);
}

if (isMainThread) {
  const failures = await runAll(Object.keys(tests));
  if (failures.length) console.error(failures.join("\n\n"));
  process.exit(failures.length ? 1 : 0);
} else {
  const failure = await tests[workerData]().then(() => "", (error) => `${workerData}: ${error.stack}`);
  parentPort.postMessage(failure);
  process.exit();
}
