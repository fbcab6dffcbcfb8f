// Elements, announcements and toasts. Text is always set as text: nothing here parses markup.

/** The element with an id. */
export const el = (id) => document.getElementById(id);

/**
 * Makes an element.
 * @param {string} tag
 * @param {Object} props Attributes; `class`, `text`, `data` (an object), and `on…` listeners. null, undefined and false
 *   leave an attribute out.
 * @param {...(Node|string|null)} children Nodes, or strings that become text nodes.
 */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Tells a screen reader something that is seen elsewhere. */
export function announce(text) {
  el("announcer").textContent = "";
  requestAnimationFrame(() => {
    el("announcer").textContent = text;
  });
}

/**
 * Shows a short message.
 * @param {string} text One sentence.
 * @param {{bad?: boolean, action?: string, onaction?: Function, seconds?: number}} options
 * @returns {Function} Takes the message away.
 */
export function toast(text, { bad = false, action = "", onaction = null, seconds = 8 } = {}) {
  const close = () => {
    clearTimeout(timer);
    node.remove();
  };
  const node = h(
    "div",
    { class: bad ? "toast bad" : "toast", role: bad ? "alert" : "status" },
    h("p", { text }),
    action ? h("button", { type: "button", class: "text action", text: action, onclick: () => (close(), onaction()) }) : null,
    h("button", { type: "button", class: "icon", "aria-label": "Close", text: "✕", onclick: close }),
  );
  const timer = setTimeout(close, seconds * 1000);
  el("toasts").append(node);
  return close;
}

/** Shows an error as one sentence; a stopped request is none. */
export function showError(error) {
  if (error?.name !== "AbortError") toast(sentence(error), { bad: true });
}

/** An error as one sentence. */
export function sentence(error) {
  const text = String(error?.message ?? error).trim() || "Something went wrong.";
  const begin = text[0].toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(begin) ? begin : `${begin}.`;
}

/** `count` with a noun in the right number. */
export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Bytes as people write them. */
export function bytes(count) {
  if (count < 1000) return `${count} B`;
  const units = ["kB", "MB", "GB"];
  let value = count / 1000;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 9.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
