// The list of videos: cards, their progress, filter, and pages of older videos.

import {
  create, fetchInputs, freeSource, getJson, makeBody, playStream, send, setSource,
} from "./api.js";
import { element } from "./form.js";

const PAGE = 24, OPEN = "queued,in_progress";
const list = document.getElementById("videos"), older = document.getElementById("older");
const news = document.getElementById("news"), empty = document.getElementById("empty");
const cards = new Map(); // id -> card
const actions = {};
let filter = { status: "", search: "" }, cursor = null, turn = 0;
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) loadThumbnail(entry.target.card);
}, { rootMargin: "200px" });

/** Sets what buttons do that concern the rest of the page: useAgain, remix, compare, pick, isPicked, drop. */
export function setActions(handlers) {
  Object.assign(actions, handlers);
}

export const isOpen = (video) => video.status === "queued" || video.status === "in_progress";

/** Shows the first page of the videos that fit a filter. */
export async function showList(newFilter) {
  filter = newFilter;
  cursor = null;
  const own = ++turn;
  const page = await loadPage(own);
  if (own !== turn) return;
  for (const id of [...cards.keys()]) drop(id);
  append(page);
}

export async function showOlder() {
  append(await loadPage(turn));
}

async function loadPage(own) {
  const data = [];
  let after = cursor, page;
  for (let round = 0; round < 10 && own === turn; round++) {
    const query = new URLSearchParams({ limit: PAGE - data.length, ...filter });
    if (after) query.set("after", after);
    page = await getJson("v1/videos?" + query);
    data.push(...page.data);
    after = page.last_id ?? after;
    if (!page.has_more || data.length >= PAGE) break;
  }
  return { data, after, more: page?.has_more };
}

function append(page) {
  cursor = page.after;
  older.hidden = !page.more;
  for (const video of page.data) show(video, list.children.length);
  empty.hidden = cards.size > 0;
}

/** Updates all unfinished videos, those that have ended since, and new ones. */
export async function refresh() {
  const current = new Map();
  for (let after = ""; after !== null;) {
    const page = await getJson(`v1/videos?limit=100&status=${OPEN}&after=${after}`);
    for (const video of page.data) current.set(video.id, video);
    after = page.has_more ? page.last_id : null;
  }
  for (const [id, card] of [...cards]) {
    if (!isOpen(card.video) || current.has(id)) continue;
    try {
      current.set(id, await getJson("v1/videos/" + id));
    } catch (error) {
      if (error.status !== 404) throw error;
      dropDeleted(card, "deleted");
    }
  }
  for (const video of [...current.values()].reverse()) {
    if (cards.has(video.id) || fits(video)) show(video);
  }
  empty.hidden = cards.size > 0;
  return [...current.values()].filter(isOpen);
}

/** Updates a video from an event of its stream. */
export function applyEvent(id, kind, data) {
  const card = cards.get(id);
  if (!card) return;
  if (kind === "end") {
    if (data.deleted) dropDeleted(card, "deleted");
    else show(data);
  } else if (kind === "stage") {
    show({ ...card.video, status: data.status, stage: data.stage, attempt: data.attempt });
  } else if (kind === "step") {
    show({ ...card.video, steps: [data.done, data.total], progress: data.progress });
  } else if (kind === "preview") {
    show({ ...card.video, preview_step: data.step });
  }
}

/** Shows what other clients have made or deleted among the newest videos since the last polls. */
export async function refreshNewest() {
  if (filter.search) return;
  const own = turn, page = await getJson("v1/videos?" + new URLSearchParams({ limit: PAGE, ...filter }));
  if (own !== turn) return;
  const ids = new Set(page.data.map((video) => video.id));
  const oldest = page.has_more ? page.data.at(-1).created_at : -1;
  for (const [id, card] of [...cards]) {
    if (!ids.has(id) && card.video.created_at > oldest && !isOpen(card.video)) drop(id);
  }
  for (const video of page.data.reverse()) show(video);
}

function fits(video) {
  const seeds = video.data.map((output) => output.seed);
  const text = `${video.prompt} ${seeds} ${video.size} ${video.id}`.toLowerCase();
  const words = filter.search.toLowerCase().split(/\s+/).filter(Boolean);
  const states = filter.status ? filter.status.split(",") : [video.status];
  return states.includes(video.status) && words.every((word) => text.includes(word));
}

export function drop(id) {
  const card = cards.get(id);
  if (!card) return;
  for (const media of card.item.querySelectorAll("img, video")) {
    media.pause?.();
    freeSource(media);
  }
  seen.unobserve(card.shot);
  clearTimeout(card.timer);
  actions.drop(id);
  card.item.remove();
  cards.delete(id);
}

/** Removes the card of a video that does not exist any more, and says so. */
function dropDeleted(card, participle) {
  drop(card.video.id);
  empty.hidden = cards.size > 0;
  news.textContent = `The video was ${participle}: ${name(card.video)}`;
}

/** Adds or updates the card of a video; new cards are sorted by time unless `index` is given. */
export function show(video, index) {
  let card = cards.get(video.id);
  if (!card) {
    card = makeCard(video);
    const isOlder = (item) => item.created < video.created_at || (item.created === video.created_at);
    const next = index === undefined ? [...list.children].find(isOlder) : list.children[index];
    card.item.created = video.created_at;
    list.insertBefore(card.item, next ?? null);
    cards.set(video.id, card);
    empty.hidden = true;
  } else if (card.video.status !== video.status && !isOpen(video)) {
    news.textContent = `${video.status === "failed" ? "Failed" : "Completed"}: ${name(video)}`;
  }
  const isNew = card.video.status !== video.status;
  card.video = video;
  update(card, isNew);
}

const name = (video) => (video.prompt || "video without a prompt").slice(0, 80);

function makeCard(video) {
  const item = element("li"), shot = element("div", "", item, { className: "shot" });
  const about = element("div", "", item, { className: "about" });
  const card = { video, item, shot, tries: 0, index: 0 };
  const label = element("label", "", item, { className: "pick small", hidden: true });
  card.pick = element("input", "", label, { type: "checkbox" });
  card.pick.setAttribute("aria-label", "Compare: " + name(video));
  label.append("compare");
  card.pick.onchange = () => pick(card);
  card.bar = element("progress", "", about, { max: 100 });
  card.bar.setAttribute("aria-label", "Progress of " + name(video));
  element("p", video.prompt || "", about, { className: "prompt", title: video.prompt || "" });
  card.facts = element("p", "", about, { className: "small" });
  card.wrong = element("p", "", about, { className: "wrong" });
  card.outputs = element("div", "", about, { className: "buttons", hidden: video.data.length < 2 });
  if (video.data.length > 1) makeOutputButtons(card);
  card.buttons = element("div", "", about, { className: "buttons" });
  card.record = element("pre", "", about, { hidden: true, tabIndex: 0 });
  shot.card = card;
  makeButtons(card);
  update(card, true);
  return card;
}

function pick(card) {
  actions.pick(chooseOutput(card.video, card.index), card.pick.checked);
}

/** Compares the shown one of several videos of a request with the next one. */
function compareSeeds(card) {
  const indices = listCompleted(card.video), next = (indices.indexOf(card.index) + 1) % indices.length;
  actions.compare([card.index, indices[next]].map((index) => chooseOutput(card.video, index)));
}

/** Adds a button for each of several videos of a request, which shows it. */
function makeOutputButtons(card) {
  for (const { index, seed } of card.video.data) {
    const button = element("button", String(index + 1), card.outputs, { type: "button", title: `seed ${seed}` });
    button.setAttribute("aria-label", `Video ${index + 1}: ${name(card.video)}`);
    button.onclick = () => {
      card.index = index;
      card.pictured = false;
      card.pick.checked = actions.isPicked(card.video.id, index);
      update(card, false);
      loadThumbnail(card);
    };
  }
}

const hasVideo = (card) => !isOpen(card.video) && card.video.data[card.index].status === "completed";
export const contentPath = ({ id }, index) => `v1/videos/${id}/content?index=${index}`;
export const listCompleted = (video) =>
  video.data.filter((output) => output.status === "completed").map((output) => output.index);

/** Returns a video object with the index and the seed of one of its videos. */
export const chooseOutput = (video, index) => ({ ...video, index, seed: video.data[index].seed });

function makeButtons(card) {
  const add = (text, work) => {
    const button = element("button", text, card.buttons, { type: "button" });
    button.setAttribute("aria-label", `${text}: ${name(card.video)}`);
    button.onclick = async () => {
      button.disabled = true;
      try {
        card.wrong.textContent = card.video.error?.message || "";
        await work();
      } catch (error) {
        card.wrong.textContent = error.message;
      }
      button.disabled = false;
    };
    return button;
  };
  add("Use again", async () => actions.useAgain(card.video, await fetchInputs(card.video)));
  add("Remix", () => actions.remix(card.video));
  card.retry = add("Retry", async () => {
    const files = await fetchInputs(card.video);
    show(await create("v1/videos", makeBody(card.video.request, files)));
  });
  card.download = add("Download", () =>
    download(contentPath(card.video, card.index), card.video.data[card.index].file_name));
  card.all = add("All files", () => download(`v1/videos/${card.video.id}/archive`, `${card.video.id}.zip`));
  card.all.title = "Videos, their request and uploaded files, as a zip";
  card.seeds = add("Compare seeds", () => compareSeeds(card));
  card.full = add("Full size", () => showFull(card));
  add("Copy seed", async () => { news.textContent = await copyText(String(card.video.data[card.index].seed)); });
  const record = add("Record", () => {
    card.record.hidden = !card.record.hidden;
    record.setAttribute("aria-expanded", String(!card.record.hidden));
    update(card, false);
  });
  card.remove = add("Delete", async () => {
    const open = isOpen(card.video), question = open ? "Cancel this video?" : "Delete this video and its files?";
    if (!confirm(`${question}\n\n${name(card.video)}`)) return;
    await send("v1/videos/" + card.video.id, { method: "DELETE" });
    dropDeleted(card, open ? "cancelled" : "deleted");
  });
}

function update(card, isNew) {
  const video = card.video, open = isOpen(video);
  card.bar.hidden = video.status !== "in_progress";
  card.bar.value = video.progress;
  card.facts.textContent = listFacts(video).join(" · ");
  for (const [index, button] of [...card.outputs.children].entries()) {
    button.disabled = isOpen(video) || video.data[index].status !== "completed";
    button.setAttribute("aria-pressed", String(index === card.index));
  }
  if (!card.record.hidden) card.record.textContent = JSON.stringify(video, null, 1);
  if (video.preview_step && open) showPreview(card);
  const { stream_url: stream } = video.data[card.index];
  if (stream && video.stage === "decoding") showStream(card, stream);
  if (!isNew) return;
  card.item.dataset.status = hasVideo(card) ? "completed" : video.status;
  card.wrong.textContent = video.error?.message || "";
  card.remove.textContent = open ? "Cancel" : "Delete";
  card.retry.hidden = video.status !== "failed";
  for (const item of [card.download, card.all, card.full, card.pick.parentElement]) item.hidden = !hasVideo(card);
  card.seeds.hidden = isOpen(video) || listCompleted(video).length < 2;
  if (hasVideo(card)) seen.observe(card.shot);
}

function listFacts(video) {
  const seeds = video.data.map((output) => output.seed), several = seeds.length > 1;
  const facts = [video.size, video.num_frames + " frames", `seed${several ? "s" : ""} ${seeds.join(", ")}`];
  if (several) {
    const done = video.data.filter((output) => output.status === "completed").length;
    facts.unshift(done < seeds.length ? `${done} of ${seeds.length} videos` : `${done} videos`);
  }
  const left = video.seconds_left == null ? "" : "about " + formatSeconds(video.seconds_left);
  if (video.status === "queued") {
    const before = video.queue_position;
    facts.push(before ? `waiting, ${before} before it` : "waiting, the next one");
    if (left) facts.push(left);
  } else if (video.status === "in_progress") {
    const [done, total] = video.steps;
    const stage = done === 0 ? "starting" : done < total ? "denoising" : "decoding";
    facts.push(video.stage || stage, `step ${done} of ${total}`);
    if (left) facts.push(left + " left");
  } else {
    facts.push(video.status);
  }
  if (video.inference_time_s) facts.push("took " + formatSeconds(video.inference_time_s));
  if (video.power?.joules) facts.push(Math.round(video.power.joules) + " J");
  if (video.power?.mean_mhz) facts.push(Math.round(video.power.mean_mhz) + " MHz");
  const names = Object.values(video.input_names || {}).flat().filter(Boolean);
  if (names.length) facts.push("from " + names.join(", "));
  facts.push(new Date(1000 * video.created_at).toLocaleString());
  return facts;
}

function formatSeconds(seconds) {
  if (seconds < 10) return seconds.toFixed(1) + " s";
  if (seconds < 100) return Math.round(seconds) + " s";
  return seconds < 5400 ? Math.round(seconds / 60) + " min" : (seconds / 3600).toFixed(1) + " h";
}

/** Shows a picture of a video in place of the one before. */
function showMedia(card, shown) {
  for (const media of card.shot.querySelectorAll("img, video")) freeSource(media);
  card.shot.replaceChildren(shown);
}

async function showPreview(card) {
  const step = String(card.video.preview_step);
  if (card.shot.dataset.step === step) return;
  card.shot.dataset.step = step;
  const image = element("img", "", null, { alt: `Preview after step ${step}` });
  image.onload = () => { if (isOpen(card.video) && !card.shot.dataset.stream) showMedia(card, image); };
  const path = `v1/videos/${card.video.id}/content?variant=preview&step=${step}`;
  await setSource(image, path).catch(() => {});
}

/** Plays a video while it is made. */
async function showStream(card, url) {
  if (card.shot.dataset.stream === url) return;
  card.shot.dataset.stream = url;
  const player = element("video", "", null, { muted: true, autoplay: true, controls: true });
  player.playsInline = true;
  player.setAttribute("aria-label", name(card.video));
  showMedia(card, player);
  await playStream(player, url).catch(() => { delete card.shot.dataset.stream; });
}

async function loadThumbnail(card) {
  if (card.pictured || !hasVideo(card)) return;
  card.pictured = true;
  const button = element("button", "", null, { type: "button" });
  button.setAttribute("aria-label", "Play: " + name(card.video));
  const image = element("img", "", button, { alt: "" });
  const again = () => {
    if (!cards.has(card.video.id)) return;
    card.pictured = false;
    const wait = 1000 * 2 ** Math.min(card.tries++, 6);
    card.timer = setTimeout(() => loadThumbnail(card), wait);
  };
  const showButton = () => { seen.unobserve(card.shot); showMedia(card, button); };
  image.onload = () => {
    const player = card.shot.querySelector("video"); // of the stream
    if (player && !player.ended && !player.error) player.onended = player.onerror = showButton;
    else showButton();
  };
  image.onerror = again;
  button.onclick = () => play(card);
  try {
    const retry = card.tries ? "&retry=" + card.tries : "";
    await setSource(image, `${contentPath(card.video, card.index)}&variant=thumbnail${retry}`);
  } catch (error) {
    if (error.status === 404) drop(card.video.id);
    else again();
  }
}

async function play(card) {
  const player = element("video", "", null, { controls: true, loop: true, autoplay: true });
  player.playsInline = true;
  player.setAttribute("aria-label", name(card.video));
  player.onerror = () => { card.wrong.textContent = "The video cannot be played."; };
  try {
    await setSource(player, contentPath(card.video, card.index));
    showMedia(card, player);
    player.focus();
  } catch (error) {
    card.wrong.textContent = error.message;
  }
}

async function download(path, name) {
  const link = element("a", "", null, { download: name });
  await setSource(link, path);
  link.href = link.src;
  link.click();
  setTimeout(() => freeSource(link), 60000);
}

/** Plays a video in its own size, or as large as the window. */
async function showFull(card) {
  const dialog = document.getElementById("full"), player = dialog.querySelector("video");
  dialog.onclose = () => { player.pause(); freeSource(player); };
  await setSource(player, contentPath(card.video, card.index));
  dialog.showModal();
}

/** Copies text, also on pages without HTTPS, where browsers have no clipboard. */
async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const area = element("textarea", "", document.body, { value: text, className: "unseen" });
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  return `Copied ${text}.`;
}
