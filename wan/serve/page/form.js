// The form of a request, made from the schema of /openapi.json. The browser stores its fields, so that a
// reload keeps them; of files it stores the names, and the user chooses them again.

import { ApiError, getJson, storedName } from "./api.js";

const HIDDEN = new Set(["model", "n", "save_latents", "webhook_url"]);
const USUAL = new Set(["lora", "preview"]);
const usual = document.getElementById("usual"), rest = document.getElementById("rest");
const message = document.getElementById("message");
const aliases = new Map(); // other name -> field
const controls = new Map(); // field -> { read, write, clear, input, wrong }

export function element(name, text, parent, properties = {}) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  Object.assign(made, properties);
  parent?.append(made);
  return made;
}

/** Builds the form and returns the name of the model. */
export async function buildForm() {
  const description = await getJson("openapi.json"), schema = description.components.schemas.VideoRequest;
  document.getElementById("random").hidden = !description.info["x-random-weights"];
  const loras = await listLoras(schema.properties.lora);
  controls.clear();
  usual.replaceChildren();
  rest.replaceChildren();
  for (const [name, entry] of Object.entries(schema.properties)) {
    if (entry["x-alias-of"]) aliases.set(name, entry["x-alias-of"]);
    if (HIDDEN.has(name) || entry["x-alias-of"] || entry["x-ignored"] || "const" in entry) continue;
    if (name === "lora" && !loras.length) continue;
    const parent = entry["x-common"] || USUAL.has(name) ? usual : rest;
    controls.set(name, makeField(name, entry, parent, describeNeed(name, schema), loras));
  }
  const defaults = ["size", "num_frames", "num_inference_steps"]
    .map((name) => schema.properties[name]).filter((entry) => entry?.default !== undefined)
    .map((entry) => entry.default + (entry.title === "Size" ? "" : " " + entry.title.toLowerCase()));
  return `${schema.properties.model.default}, as started: ${defaults.join(", ")}`;
}

/** Returns how a field is needed: "needed", "needed with ...", "this or ... is needed", or "". */
function describeNeed(name, schema) {
  if (schema.required?.includes(name)) return "needed";
  if (schema.then?.required.includes(name)) return `needed with ${schema.properties[schema.if.required[0]].title}`;
  const names = (schema.anyOf || []).flatMap((choice) => choice.required);
  const others = names.filter((other) => other !== name).map((other) => schema.properties[other].title);
  return names.includes(name) ? `this or ${others.join(" or ")} is needed` : "";
}

async function listLoras(entry) {
  if (!entry || entry["x-ignored"]) return [];
  try {
    return (await getJson("v1/loras")).data.filter((row) => !row.error).map((row) => row.name);
  } catch {
    return [];
  }
}

function makeField(name, entry, parent, need, loras) {
  const box = element("div", "", parent, { className: "field" });
  const label = element("label", entry.title, box, { htmlFor: "field-" + name, title: name });
  const control = chooseControl(name, entry, box, label, loras);
  control.title = entry.title;
  control.input.id = "field-" + name;
  control.input.name ||= name;
  control.input.required = need === "needed";
  if (need) element("span", ` (${need})`, label, { className: "needed" });
  const hint = element("p", describe(entry, control.input.type !== "checkbox"), box, { className: "hint", id: "hint-" + name });
  control.wrong = element("p", "", box, { className: "wrong", id: "wrong-" + name });
  control.wrong.setAttribute("role", "alert");
  control.input.setAttribute("aria-describedby", hint.id + " " + control.wrong.id);
  control.input.addEventListener("input", () => showWrong(control, ""));
  return control;
}

function describe(entry, hasLimits) {
  const limits = [];
  const low = entry.minimum ?? entry.exclusiveMinimum;
  if (hasLimits && low !== undefined && Math.abs(low) < 1e9) limits.push(`${low} to ${entry.maximum}`);
  if (entry["x-step"]) limits.push(`in steps of ${entry["x-step"]}`);
  const isPlain = entry.description?.toLowerCase().endsWith(entry.title.toLowerCase());
  return [isPlain ? "" : entry.description, limits.join(", ")].filter(Boolean).join("; ");
}

function chooseControl(name, entry, box, label, loras) {
  if (entry["x-media"]) return makeFileControl(entry, box);
  if (name === "lora") return makeLoraControl(box, loras);
  if (entry.type === "boolean" || name === "preview") return makeCheckControl(entry, label);
  if (entry.enum) return makeSelectControl(entry, box);
  return makeTextControl(name, entry, box);
}

function makeTextControl(name, entry, box) {
  const isList = entry.type === "array" && entry.items.type === "string";
  const isLong = isList || entry.maxLength > 1000;
  const input = element(isLong ? "textarea" : "input", "", box);
  input.placeholder = entry.default === -1 ? "random" : String(entry.default ?? "");
  if (isLong) box.classList.add("wide");
  if (isList) input.placeholder = "one per line";
  if (entry.type === "integer") input.inputMode = "numeric";
  if (entry.type === "number") input.inputMode = "decimal";
  if (entry.examples) {
    const list = element("datalist", "", box, { id: "examples-" + name });
    for (const example of entry.examples) element("option", "", list, { value: example });
    input.setAttribute("list", list.id);
  }
  const split = () => input.value.split("\n").filter((line) => line.trim());
  return {
    input,
    read: () => (input.value.trim() === "" ? undefined : isList ? split() : input.value),
    write: (value) => { input.value = [value].flat().join(isList ? "\n" : ","); },
    clear: () => { input.value = ""; },
  };
}

function makeSelectControl(entry, box) {
  const input = element("select", "", box);
  const started = entry.default === undefined ? "default" : `${entry.default} (as started)`;
  element("option", started, input, { value: "" });
  for (const choice of entry.enum) element("option", String(choice), input, { value: choice });
  return {
    input,
    read: () => input.value || undefined,
    write: (value) => { input.value = String(value); },
    clear: () => { input.value = ""; },
  };
}

function makeCheckControl(entry, label) {
  const input = element("input", "", null, { type: "checkbox" });
  const started = Boolean(entry.default);
  label.prepend(input);
  label.className = "check";
  input.checked = started;
  return {
    input,
    read: () => (input.checked === started ? undefined : input.checked),
    write: (value) => { input.checked = value === true || /^(yes|true|t|y|1)$/i.test(value); },
    clear: () => { input.checked = started; },
  };
}

function makeFileControl(entry, box) {
  box.classList.add("wide");
  const multiple = Boolean(entry.anyOf?.some((choice) => choice.type === "array"));
  const input = element("input", "", box, { type: "file", accept: entry["x-media"], multiple });
  const previews = element("div", "", box, { className: "previews" });
  const remove = element("button", "Remove", null, { type: "button" });
  const change = () => {
    for (const shown of previews.children) if (shown.src) URL.revokeObjectURL(shown.src);
    previews.replaceChildren(...[...input.files].map((file) => preview(file, entry["x-media"])));
    const names = [...input.files].map((file) => file.name).join(", "); // of one file, the input shows the name
    if (input.files.length > 1) element("span", names, previews, { className: "small" });
    if (input.files.length) previews.append(remove);
  };
  const write = (files) => {
    const transfer = new DataTransfer();
    for (const file of files) transfer.items.add(file);
    input.files = transfer.files;
    change();
  };
  input.addEventListener("change", change);
  remove.onclick = () => { write([]); input.focus(); };
  return { input, isFile: true, read: () => [...input.files], write, clear: () => write([]) };
}

function preview(file, media) {
  const kind = (file.type || media).split("/")[0];
  const shown = element({ image: "img", video: "video", audio: "audio" }[kind] || "span");
  shown.title = file.name;
  if (kind === "image") shown.alt = file.name;
  else Object.assign(shown, { muted: kind === "video", controls: kind === "audio", preload: "metadata" });
  shown.src = URL.createObjectURL(file);
  return shown;
}

function makeLoraControl(box, names) {
  box.classList.add("wide");
  const input = element("fieldset", "", box);
  const rows = names.map((name) => {
    const row = element("div", "", input, { className: "row" });
    const label = element("label", "", row, { className: "inline" });
    const chosen = element("input", "", label, { type: "checkbox" });
    label.append(name);
    const scale = element("input", "", row, { value: "1", inputMode: "decimal" });
    scale.setAttribute("aria-label", "Strength of " + name);
    return { name, chosen, scale };
  });
  const read = () => rows.filter((row) => row.chosen.checked)
    .map((row) => ({ name: row.name, scale: readNumber(row.scale.value) }));
  const write = (chosen) => {
    for (const row of rows) {
      const entry = [chosen].flat().find((item) => item.name === row.name);
      row.chosen.checked = Boolean(entry);
      row.scale.value = entry?.scale ?? 1;
    }
  };
  return { input, read: () => (read().length ? read() : undefined), write, clear: () => write([]) };
}

/** Returns a number, or the text that the API refuses. */
function readNumber(text) {
  return text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text);
}

/** Returns the fields and the files that the user has given. */
export function readForm() {
  const fields = {}, files = {};
  for (const [name, control] of controls) {
    const value = control.read();
    if (control.isFile && value.length) files[name] = value;
    else if (!control.isFile && value !== undefined) fields[name] = value;
  }
  return { fields, files };
}

export function clearForm() {
  for (const control of controls.values()) {
    control.clear();
    showWrong(control, "");
  }
  message.textContent = "";
}

/** Stores the fields, and the names of chosen files. */
export function storeForm(count) {
  const { fields, files } = readForm();
  const names = Object.entries(files).map(([name, list]) => [name, list.map((file) => file.name)]);
  localStorage.setItem(storedName("form"), JSON.stringify({ fields, files: Object.fromEntries(names), count }));
}

/** Fills the form with the stored fields and returns the stored number of videos. */
export function restoreForm() {
  const { fields = {}, files = {}, count = "1" } = JSON.parse(localStorage.getItem(storedName("form")) || "{}");
  writeFields(fields);
  const texts = Object.entries(files).filter(([name]) => controls.has(name))
    .map(([name, names]) => `${controls.get(name).title} (${names.join(", ")})`);
  message.textContent = texts.length ? `Choose these files again: ${texts.join(", ")}.` : "";
  return count;
}

function writeFields(values) {
  for (const [name, value] of Object.entries(values)) controls.get(name)?.write(value);
  const used = [...controls].filter(([name]) => name in values);
  if (used.some(([, control]) => rest.contains(control.input))) rest.parentElement.open = true;
}

/** Fills the form with the fields and files of an earlier request. */
export function fillForm(fields, files) {
  clearForm();
  writeFields({ ...fields, ...files });
  const unknown = Object.keys(fields).filter((name) => !controls.has(name) && !HIDDEN.has(name));
  message.textContent = unknown.length ? `Not in this form: ${unknown.join(", ")}.` : "";
  controls.get("prompt").input.focus();
}

/** Shows an error next to the field that it is about, or below the form; "" removes all. */
export function showError(error) {
  for (const control of controls.values()) showWrong(control, "");
  message.textContent = "";
  if (!error) return;
  const control = error instanceof ApiError ? controls.get(aliases.get(error.param) ?? error.param) : undefined;
  if (!control) {
    message.textContent = error.message;
    return;
  }
  if (rest.contains(control.input)) rest.parentElement.open = true;
  showWrong(control, error.message);
  control.input.focus();
}

function showWrong(control, text) {
  control.wrong.textContent = text;
  if (text) control.input.setAttribute("aria-invalid", "true");
  else control.input.removeAttribute("aria-invalid");
}
