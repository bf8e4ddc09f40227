// The page: connects form, list, comparison, polling and events.

import { create, freeSource, getKey, makeBody, readEvents, setKey, setSource } from "./api.js";
import {
  buildForm, clearForm, element, fillForm, readForm, restoreForm, showError, storeForm,
} from "./form.js";
import {
  applyEvent, chooseOutput, contentPath, listCompleted, refresh, refreshNewest, setActions, show, showList, showOlder,
} from "./videos.js";

const find = (id) => document.getElementById(id);
const form = find("form"), generate = find("generate"), state = find("state"), key = find("key");
const comparison = find("comparison"), remixer = find("remix");
const NO_STREAM = 60000; // milliseconds without a try after a stream of events was refused
let timer = null, busy = false, built = false, picked = [], rounds = 0;
let followed = null, streamsFrom = 0; // id of the video whose events are read; time of the next try

// Start and polling.

async function start() {
  find("model").textContent = await buildForm();
  find("count").value = restoreForm();
  built = true;
  form.hidden = false;
  find("keyed").hidden = true;
  await showList(readFilter());
}

async function poll() {
  let open = [];
  timer = null;
  try {
    const health = await (await fetch("health")).json().catch(() => ({ status: "unreachable" }));
    if (!built) await start();
    open = await refresh();
    if (rounds++ % 8 === 7) await refreshNewest();
    setState(describe(health), health.status !== "ok");
    follow(open.find((video) => video.status === "in_progress"));
  } catch (error) {
    if (error.status === 401) {
      find("keyed").hidden = false;
      form.hidden = true;
      built = false;
    }
    setState(error.status === undefined ? "The service does not answer." : error.message, true);
  }
  const pause = followed ? 5000 : open.length || !built ? 1500 : 4000;
  timer = setTimeout(poll, document.hidden ? 10000 : pause);
}

/** Shows the events of a running video; without a stream, polls show its progress. */
async function follow(video) {
  if (followed || !video || Date.now() < streamsFrom) return;
  followed = video.id;
  try {
    await readEvents(`v1/videos/${video.id}/events`, (kind, data) => applyEvent(video.id, kind, data));
    pollSoon();
  } catch {
    streamsFrom = Date.now() + NO_STREAM;
  }
  followed = null;
}

/** Polls soon, unless a poll is in progress. */
function pollSoon() {
  if (timer === null) return;
  clearTimeout(timer);
  timer = setTimeout(poll, 500);
}

function describe(health) {
  const ahead = health.seconds_ahead ? `, about ${Math.ceil(health.seconds_ahead)} s ahead` : "";
  const reason = health.reason ? `: ${health.reason}` : "";
  return `${health.status}${reason}, ${health.queued} waiting${ahead}`;
}

function setState(text, isWrong) {
  if (state.textContent !== text) state.textContent = text;
  state.classList.toggle("wrong", isWrong);
}

key.value = getKey();
key.onchange = () => setKey(key.value);

// The form.

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (busy) return;
  busy = generate.disabled = true;
  showError(null);
  try {
    const { fields, files } = readForm();
    const count = find("count").value.trim();
    if (count && count !== "1") fields.n = count;
    show(await create("v1/videos", makeBody(fields, files)));
    find("news").textContent = "Queued.";
    pollSoon();
    if (innerWidth < 1024) find("videos").scrollIntoView({ block: "nearest" });
  } catch (error) {
    showError(error);
  }
  busy = generate.disabled = false;
});

form.addEventListener("reset", (event) => {
  event.preventDefault();
  clearForm();
  find("count").value = "1";
  storeForm("1");
});

form.addEventListener("input", () => storeForm(find("count").value));
form.addEventListener("change", () => storeForm(find("count").value));

form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

// The list.

function readFilter() {
  return { status: find("status").value, search: find("search").value.trim() };
}

let typing;
const search = () => showList(readFilter()).catch((error) => setState(error.message, true));
find("status").onchange = search;
find("search").oninput = () => { clearTimeout(typing); typing = setTimeout(search, 250); };
find("older").onclick = () => showOlder().catch((error) => setState(error.message, true));

setActions({
  useAgain: (video, files) => {
    fillForm(video.request, files);
    find("count").value = "1"; // several videos have a list of seeds
    storeForm("1");
    form.scrollIntoView({ block: "start" });
  },
  isPicked: (id, index) => picked.some((video) => video.id === id && video.index === index),
  drop: (id) => { for (const video of picked.filter((other) => other.id === id)) setPicked(video, false); },
  remix: (video) => {
    const [area, wrong] = [remixer.querySelector("textarea"), remixer.querySelector("[role=alert]")];
    area.value = video.prompt || "";
    wrong.textContent = "";
    remixer.video = video;
    remixer.showModal();
    area.focus();
  },
  pick: setPicked,
  compare,
});

function setPicked(video, isPicked) {
  picked = picked.filter((other) => other.id !== video.id || other.index !== video.index);
  if (isPicked) picked.push(video);
  find("compare").disabled = picked.length !== 2;
  find("compare").textContent = picked.length > 2 ? "Choose two" : "Compare two";
}

remixer.addEventListener("submit", async (event) => {
  if (event.submitter.value !== "remix") return;
  event.preventDefault();
  event.submitter.disabled = true;
  try {
    const body = JSON.stringify({ prompt: remixer.querySelector("textarea").value });
    show(await create(`v1/videos/${remixer.video.id}/remix`, body));
    remixer.close();
  } catch (error) {
    remixer.querySelector("[role=alert]").textContent = error.message;
  }
  event.submitter.disabled = false;
});

// Two videos side by side, played at the same time.

find("compare").onclick = () => compare([...picked]);

async function compare(videos) {
  const pair = comparison.querySelector(".pair");
  pair.replaceChildren();
  const showTable = () => showDifferences(comparison.querySelector("table"), videos);
  showTable();
  comparison.showModal();
  const load = (player, video) => setSource(player, contentPath(video, video.index)).catch(showError);
  for (const [side, video] of videos.entries()) {
    const figure = element("figure", "", pair);
    const player = element("video", "", figure, { muted: true, playsInline: true });
    player.setAttribute("aria-label", video.prompt || video.id);
    const caption = element("figcaption", "", figure, { className: "small" });
    makeSeedChoice(video, caption, (index) => {
      videos[side] = chooseOutput(video, index);
      freeSource(player);
      showTable();
      return load(player, videos[side]);
    });
    await load(player, video);
  }
  synchronize([...pair.querySelectorAll("video")], videos[0].fps || 16);
}

/** Shows the seed of a video; of several videos of a request another one can be chosen. */
function makeSeedChoice(video, parent, choose) {
  const indices = listCompleted(video);
  if (indices.length < 2) {
    parent.textContent = `seed ${video.seed}`;
    return;
  }
  const label = element("label", "seed ", parent, { className: "inline" }), select = element("select", "", label);
  for (const index of indices) element("option", String(video.data[index].seed), select, { value: index });
  select.value = String(video.index);
  select.onchange = () => choose(Number(select.value));
}

function synchronize(players, fps) {
  const slider = comparison.querySelector("[type=range]");
  const button = (what) => comparison.querySelector(`[data-do=${what}]`);
  const length = () => Math.max(...players.map((player) => player.duration || 0));
  const leader = () => players.reduce((a, b) => ((b.duration || 0) > (a.duration || 0) ? b : a));
  const seek = (time) => {
    for (const player of players) player.currentTime = Math.min(time, player.duration || 0);
    slider.value = time;
  };
  let playing = false;
  for (const player of players) { // when another seed is chosen
    player.onloadeddata = () => {
      if (playing) player.play().catch(() => {});
      else player.currentTime = Math.min(slider.value, player.duration);
    };
  }
  const setPlaying = (value) => {
    playing = value;
    button("play").textContent = playing ? "Pause" : "Play";
    for (const player of players) {
      if (playing && !(player.currentTime >= player.duration)) player.play().catch(() => {});
      else player.pause();
    }
  };
  const restart = async () => {
    setPlaying(false);
    const ready = players.map((player) => new Promise((done) => { player.onseeked = done; }));
    seek(0);
    await Promise.all(ready);
    if (comparison.open) setPlaying(true);
  };
  const step = (frames) => { setPlaying(false); seek(Math.max(leader().currentTime + frames / fps, 0)); };
  const follow = () => {
    if (!comparison.open) return;
    slider.max = length() || 1;
    if (playing) {
      const time = leader().currentTime;
      slider.value = time;
      for (const player of players) {
        const late = time - player.currentTime;
        if (time >= player.duration) continue;
        if (Math.abs(late) > 0.3) player.currentTime = time;
        else player.playbackRate = Math.abs(late) < 0.02 ? 1 : 1 + Math.max(-0.5, Math.min(3 * late, 0.5));
      }
      if (leader().ended) restart();
    }
    requestAnimationFrame(follow);
  };
  button("play").onclick = () => setPlaying(!playing);
  button("back").onclick = () => step(-1);
  button("next").onclick = () => step(1);
  button("close").onclick = () => comparison.close();
  slider.oninput = () => { setPlaying(false); seek(Number(slider.value)); };
  comparison.onclose = () => { setPlaying(false); players.forEach(freeSource); };
  setPlaying(true);
  requestAnimationFrame(follow);
}

/** Lists the fields in which two videos differ. */
function showDifferences(table, videos) {
  const rows = videos.map((video) => ({
    prompt: video.prompt, size: video.size, num_frames: video.num_frames,
    ...flatten(video.guidance, "guidance "), ...video.request, seed: video.seed,
    "seconds taken": video.inference_time_s?.toFixed(1),
  }));
  table.replaceChildren();
  for (const name of new Set(rows.flatMap((row) => Object.keys(row)))) {
    const values = rows.map((row) => (row[name] === undefined ? "as started" : String(row[name])));
    if (values[0] === values[1]) continue;
    const line = element("tr", "", table);
    element("th", name.replaceAll("_", " "), line, { scope: "row" });
    for (const value of values) element("td", value, line);
  }
}

function flatten(values, prefix) {
  return Object.fromEntries(Object.entries(values || {}).map(([name, value]) => [prefix + name, value]));
}

poll();
