// A document for tests of the page's scripts without a browser, as far as they use one.

/** Addresses of all images and videos that were loaded. */
export const sources = [];

class Element extends EventTarget {
  constructor(name) {
    super();
    Object.assign(this, { tagName: name.toUpperCase(), childNodes: [], attributes: {}, dataset: {} });
    Object.assign(this, { hidden: false, value: "", textContent: "", files: [], parentElement: null });
    this.classList = { add() {}, toggle() {} };
  }
  get src() { return sources.at(-1) ?? ""; }
  set src(path) { if (path) sources.push(path); }
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  setAttribute(name, value) { this.attributes[name] = value; }
  removeAttribute(name) { delete this.attributes[name]; }
  remove() { this.parentElement?.replaceChildren(...this.parentElement.childNodes.filter((n) => n !== this)); }
  append(...nodes) { for (const node of nodes) this.insertBefore(node, null); }
  prepend(node) { this.insertBefore(node, this.childNodes[0] ?? null); }
  replaceWith(node) { this.parentElement.insertBefore(node, this); this.remove(); }
  insertBefore(node, next) {
    if (node instanceof Element) {
      node.remove();
      node.parentElement = this;
    }
    this.childNodes.splice(next ? this.childNodes.indexOf(next) : this.childNodes.length, 0, node);
  }
  replaceChildren(...nodes) {
    this.childNodes = [];
    this.append(...nodes);
  }
  contains(node) { return node === this || this.children.some((child) => child.contains(node)); }
  querySelectorAll(names) {
    const wanted = names.toUpperCase().split(/,\s*/);
    return this.children.flatMap((child) =>
      [...(wanted.includes(child.tagName) ? [child] : []), ...child.querySelectorAll(names)]);
  }
  querySelector(names) { return this.querySelectorAll(names)[0] ?? new Element("div"); }
  focus() {}
  scrollIntoView() {}
  click() { return this.onclick?.({}); }
  /** All text in it. */
  get text() {
    return [this.textContent, ...this.childNodes.map((node) => node.text ?? node)].join(" ");
  }
}

const ids = new Map();

export function byId(id) {
  if (!ids.has(id)) {
    ids.set(id, new Element("div"));
    new Element("section").append(ids.get(id));
  }
  return ids.get(id);
}

Object.assign(globalThis, {
  document: { getElementById: byId, createElement: (name) => new Element(name), body: new Element("body"), hidden: false },
  sessionStorage: {
    stored: new Map(),
    getItem(name) { return this.stored.get(name) ?? null; },
    setItem(name, text) { this.stored.set(name, text); },
  },
  IntersectionObserver: class { observe() {} unobserve() {} },
  DataTransfer: class { files = []; items = { add: (file) => this.files.push(file) }; },
  innerWidth: 2000,
});

const wait = globalThis.setTimeout;
globalThis.setTimeout = (work, milliseconds) => wait(work, milliseconds / 5); // pauses of the page

/** Waits until a condition holds. */
export async function until(condition) {
  for (let round = 0; !condition(); round++) {
    if (round > 1000) throw new Error(`not in 10 s: ${condition}`);
    await new Promise((done) => wait(done, 10));
  }
}
