// A document for tests of the page's scripts without a browser, as far as they use one.

const EMPTY = /^(meta|link|input)$/i; // elements without content
const wait = globalThis.setTimeout;
const timers = new Set();

class Element extends EventTarget {
  #value; #source = ""; #time = 0;

  constructor(name, attributes = {}) {
    super();
    Object.assign(this, { tagName: name.toUpperCase(), childNodes: [], dataset: {}, parentElement: null });
    Object.assign(this, { hidden: false, disabled: false, checked: false, open: false, className: "" });
    Object.assign(this, { files: [], attributes: {}, type: name === "button" ? "submit" : "" });
    this.classList = {
      add: (text) => { this.className += " " + text; },
      toggle: (text, isOn) => { this.className = this.className.replaceAll(text, "") + (isOn ? " " + text : ""); },
    };
    for (const [key, value] of Object.entries(attributes)) this.setAttribute(key, value);
    if (name === "video") Object.assign(this, { paused: true, duration: NaN, playbackRate: 1, ended: false });
  }

  // Attributes and properties.
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = value;
    else if (["id", "value", "type"].includes(name)) this[name] = value;
    else if (["hidden", "disabled", "required"].includes(name)) this[name] = true;
  }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeAttribute(name) { delete this.attributes[name]; }
  get value() {
    if (this.tagName !== "SELECT") return this.#value ?? "";
    const values = this.children.map((option) => String(option.value));
    return values.includes(this.#value) ? this.#value : this.#value === undefined ? values[0] : "";
  }
  set value(value) { this.#value = String(value); }
  get src() { return this.#source; }
  set src(path) {
    this.#source = path;
    if (path) page.sources.push(path);
    const isBroken = page.broken.delete(path);
    if (path && this.tagName === "IMG") wait(() => this.fire(isBroken ? "error" : "load"), 0);
  }

  // Content.
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  get textContent() {
    return this.childNodes.map((node) => (node instanceof Element ? node.textContent : node)).join("");
  }
  set textContent(text) { this.replaceChildren(...(text ? [String(text)] : [])); }
  /** All text in it, with spaces between the elements. */
  get text() { return this.childNodes.map((node) => node.text ?? node).join(" ").replace(/\s+/g, " ").trim(); }
  remove() { this.#takeOut(this); }
  #takeOut(node) {
    const siblings = node.parentElement?.childNodes;
    if (siblings) siblings.splice(siblings.indexOf(node), 1);
    node.parentElement = null;
  }
  append(...nodes) { for (const node of nodes) this.insertBefore(node, null); }
  prepend(node) { this.insertBefore(node, this.childNodes[0] ?? null); }
  replaceWith(node) {
    this.parentElement.insertBefore(node, this);
    this.remove();
  }
  insertBefore(node, next) {
    if (node instanceof Element) {
      this.#takeOut(node);
      node.parentElement = this;
    }
    this.childNodes.splice(next ? this.childNodes.indexOf(next) : this.childNodes.length, 0, node);
  }
  replaceChildren(...nodes) {
    for (const child of this.children) child.remove();
    this.childNodes = [];
    this.append(...nodes);
  }
  contains(node) { return node === this || this.children.some((child) => child.contains(node)); }
  matches(selector) {
    return selector.split(/,\s*/).some((one) => {
      const [, name, rest] = one.match(/^([a-z]*)(.*)$/);
      const [, attribute, value] = rest.match(/^\[([\w-]+)=(\w+)\]$/) ?? [];
      return (!name || this.tagName === name.toUpperCase())
        && (!attribute || this.attributes[attribute] === value)
        && (!rest.startsWith(".") || this.attributes.class === rest.slice(1));
    });
  }
  querySelectorAll(selector) {
    return this.children.flatMap((child) =>
      [...(child.matches(selector) ? [child] : []), ...child.querySelectorAll(selector)]);
  }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
  find(isWanted) {
    for (const child of this.children) {
      const found = isWanted(child) ? child : child.find(isWanted);
      if (found) return found;
    }
    return null;
  }

  // Events go up to the parents; a button submits or resets its form.
  fire(kind, properties = {}) {
    const event = Object.assign(new Event(kind, { cancelable: true }), properties);
    for (let target = this; target; target = target.parentElement) {
      target["on" + kind]?.(event);
      target.dispatchEvent(event);
      if (/load|error|close/.test(kind)) break;
    }
    return !event.defaultPrevented;
  }
  click() {
    if (this.disabled) return;
    if (this.tagName === "A") page.downloads.push([this.download, this.href]);
    this.fire("click");
    let form = this.parentElement;
    while (form && form.tagName !== "FORM") form = form.parentElement;
    if (this.tagName !== "BUTTON" || !form || this.type === "button") return;
    const isClosed = form.fire(this.type, { submitter: this }) && form.attributes.method === "dialog";
    if (isClosed) form.parentElement.close();
  }
  requestSubmit() { this.find((node) => node.type === "submit").click(); }
  focus() { document.activeElement = this; }
  select() {}
  scrollIntoView() {}
  showModal() { this.open = true; }
  close() {
    this.open = false;
    this.fire("close");
  }

  // Videos.
  get currentTime() { return this.#time; }
  set currentTime(time) {
    this.#time = time;
    wait(() => this.onseeked?.(), 1);
  }
  async play() { this.paused = false; }
  pause() { this.paused = true; }
}

/** What the page has done, the answer to its questions, and sources that fail once. */
export const page = { sources: [], downloads: [], questions: [], copied: [], blobs: new Map(), broken: new Set() };

/** Opens another page of an HTML text; the timers of the one before end. */
export function openDocument(html, stored = {}) {
  for (const timer of timers) clearTimeout(timer);
  timers.clear();
  Object.assign(page, { sources: [], downloads: [], questions: [], copied: [], isConfirmed: true });
  page.blobs.clear();
  let parent = new Element("document");
  const root = parent;
  for (const [, end, name, rest, text] of html.matchAll(/<(\/?)([a-z]\w*)([^>]*)>|([^<]+|<!doctype[^>]*>)/g)) {
    if (end) parent = parent.parentElement;
    else if (text?.trim() && !text.startsWith("<!")) parent.append(text.trim());
    else if (name) {
      const attributes = [...rest.matchAll(/([\w-]+)(?:="([^"]*)")?/g)].map((match) => [match[1], match[2] ?? ""]);
      const node = new Element(name, Object.fromEntries(attributes));
      parent.append(node);
      if (!EMPTY.test(name)) parent = node;
    }
  }
  const makeStorage = () => {
    const items = new Map(Object.entries(stored));
    return {
      getItem: (name) => items.get(name) ?? null,
      setItem: (name, text) => { items.set(name, String(text)); },
    };
  };
  Object.assign(globalThis, {
    document: {
      hidden: false, baseURI: "https://host.example/wan/", body: root.querySelector("body"), activeElement: null, execCommand() {},
      getElementById: (id) => root.find((node) => node.id === id),
      createElement: (name) => new Element(name),
    },
    localStorage: makeStorage(),
    sessionStorage: makeStorage(),
  });
}

/** Returns the element with an id. */
export const byId = (id) => document.getElementById(id);

/** Waits until a condition holds. */
export async function until(condition) {
  for (let round = 0; !condition(); round++) {
    if (round > 1000) throw new Error(`not in 10 s: ${condition}`);
    await new Promise((done) => wait(done, 10));
  }
}

Object.assign(globalThis, {
  innerWidth: 2000,
  IntersectionObserver: class {
    constructor(work) { this.work = work; }
    observe(target) { wait(() => this.work([{ isIntersecting: true, target }]), 0); }
    unobserve() {}
  },
  DataTransfer: class { files = []; items = { add: (file) => this.files.push(file) }; },
  confirm: (text) => {
    page.questions.push(text);
    return page.isConfirmed;
  },
  requestAnimationFrame: (work) => setTimeout(work, 20),
  setTimeout: (work, milliseconds) => { // pauses of the page are a tenth
    const timer = wait(() => {
      timers.delete(timer);
      work();
    }, milliseconds / 10);
    timers.add(timer);
    return timer;
  },
});
Object.defineProperty(globalThis, "navigator", {
  value: { clipboard: { writeText: async (text) => { page.copied.push(text); } } }, configurable: true,
});
let numBlobs = 0;
URL.createObjectURL = (blob) => {
  page.blobs.set(`blob:${++numBlobs}`, blob);
  return `blob:${numBlobs}`;
};
URL.revokeObjectURL = (address) => { page.blobs.delete(address); };
