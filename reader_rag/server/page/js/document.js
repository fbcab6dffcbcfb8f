// One document in the side panel: its text with the asked characters highlighted, and a PDF's original beside it.

import { call, callJson } from "./api.js";
import { announce, counted, el, h, sentence, showError } from "./dom.js";
import { codeUnits } from "./text.js";

const BLOCK = 20_000; // code units of text in one element: browsers lay out only those that are seen
let original = null; // the blob URL of the original that is shown
let turn = 0;

/**
 * Shows a document.
 * @param {{document: string, version: string|null, start: number|null, end: number|null}} place
 * @param {() => void} onclose
 */
export async function openDocument(place, onclose) {
  const mine = ++turn;
  leaveDocument();
  const side = el("side");
  side.setAttribute("aria-label", "Document");
  const title = h("h2", { text: "Document", tabindex: "-1" });
  const actions = h("div", { class: "bar-actions" });
  const close = h("button", { type: "button", class: "icon", "aria-label": "Close the document", text: "✕", onclick: onclose });
  const body = h("div", { class: "document-body", tabindex: "0", role: "region", "aria-label": "Text of the document" });
  const split = h("div", { class: "document-split" }, body);
  split.style.gridTemplate = "minmax(0, 1fr) / minmax(0, 1fr)";
  body.append(h("p", { class: "quiet", text: "Loading …" }));
  side.replaceChildren(h("div", { class: "side-bar" }, title, actions, close), split);
  title.focus({ preventScroll: true });
  let found;
  try {
    const query = place.version ? `?v=${encodeURIComponent(place.version)}` : "";
    found = await callJson(`api/documents/${encodeURIComponent(place.document)}${query}`);
  } catch (error) {
    if (mine === turn) body.replaceChildren(gone(error));
    return;
  }
  if (mine !== turn) return;
  if (found.pages.length === 1 && !isPdf(found)) found.pages = []; // a format without pages is one page to the server
  title.textContent = found.name;
  title.title = found.name;
  const units = codeUnits(found.text, [place.start ?? 0, place.end ?? 0]);
  const asked = place.start !== null && units[1] > units[0] ? { start: units[0], end: units[1] } : null;
  const text = h("div", { class: "document-text" });
  drawText(text, found, asked);
  const head = about(found, asked, place);
  body.replaceChildren(...(head ? [h("p", { class: "document-head", text: head })] : []), text);
  actions.replaceChildren(...originals(found, split, pageAt(found, place.start)));
  const mark = text.querySelector("mark");
  if (mark) {
    mark.scrollIntoView({ block: "center" });
    mark.focus({ preventScroll: true });
    announce(`${title.textContent}: the copied characters are highlighted.`);
  }
}

/** Frees what the shown document holds. */
export function leaveDocument() {
  if (original) URL.revokeObjectURL(original);
  original = null;
}

function gone(error) {
  const version = error.code === "version_gone";
  const missing = error.status === 404;
  const heading = version ? "This version is gone" : missing ? "This document is gone" : "The document cannot be shown";
  const reason = version
    ? "The document was changed after this answer, so its characters are not shown in place of the old ones."
    : missing
      ? "It was deleted, or the address is wrong."
      : sentence(error);
  return h("div", { class: "gone" }, h("h3", { text: heading }), h("p", { class: "quiet", text: reason }));
}

function about(found, asked, place) {
  const page = asked && found.pages.length ? pageAt(found, place.start) : null;
  const parts = [];
  if (found.pages.length) parts.push(counted(found.pages.length, "page"));
  if (page !== null) parts.push(`highlighted on page ${page}`);
  return parts.join(" · ");
}

/** The page that has a code point; the first one without it, null for a document without pages. */
function pageAt(found, point) {
  const pages = found.pages;
  if (!pages.length) return null;
  const page = pages.find((one) => (point ?? 0) >= one.start && (point ?? 0) < one.end) ?? pages[0];
  return page.number;
}

/** Writes the text page by page, in blocks, with a <mark> around the asked characters in each block they touch. */
function drawText(target, found, asked) {
  const pages = found.pages.length ? found.pages : [{ number: null, start: 0, end: Infinity }];
  const units = codeUnits(found.text, pages.flatMap((page) => [page.start, page.end]));
  let first = true;
  pages.forEach((page, index) => {
    let begin = units[2 * index];
    const end = units[2 * index + 1];
    let joined = false;
    do {
      const stop = breakAt(found.text, begin, end);
      const block = h("section", { class: joined ? "document-page joined" : "document-page" });
      if (page.number !== null && !joined) block.append(h("h3", { text: `Page ${page.number}` }));
      const inner = h("div", { class: "text" });
      const from = asked ? Math.max(asked.start, begin) : 0;
      const to = asked ? Math.min(asked.end, stop) : 0;
      if (asked && from < to) {
        const mark = h("mark", { text: found.text.slice(from, to), ...(first ? { id: "highlight", tabindex: "-1" } : {}) });
        inner.append(found.text.slice(begin, from), mark, found.text.slice(to, stop));
        first = false;
      } else {
        inner.append(found.text.slice(begin, stop));
      }
      block.append(inner);
      target.append(block);
      begin = stop;
      joined = true;
    } while (begin < end);
  });
}

/** Where a block of text ends: after a line break if there is one, never within a pair of surrogates. */
function breakAt(text, begin, end) {
  if (end - begin <= BLOCK) return end;
  const line = text.lastIndexOf("\n", begin + BLOCK);
  if (line > begin) return line + 1;
  const low = text.charCodeAt(begin + BLOCK);
  return begin + BLOCK + (low >= 0xdc00 && low < 0xe000 ? 1 : 0);
}

const isPdf = (found) => /\.pdf$/i.test(found.name);

function originals(found, split, page) {
  if (!found.original) return [];
  const fetched = async (type) => {
    const response = await call(`api/documents/${encodeURIComponent(found.id)}/original`);
    return URL.createObjectURL(new Blob([await response.arrayBuffer()], { type }));
  };
  const save = h("button", { type: "button", class: "text", text: "Download" });
  save.addEventListener("click", async () => {
    try {
      const url = await fetched("application/octet-stream");
      h("a", { href: url, download: found.name }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    } catch (error) {
      showError(error);
    }
  });
  // Only a PDF is shown: another original, of HTML above all, could act as this page.
  if (!isPdf(found)) return [save];
  const show = h("button", { type: "button", class: "text", text: "Original", "aria-pressed": "false" });
  show.addEventListener("click", async () => {
    const frame = split.querySelector("iframe");
    const place = () => split.querySelector("mark")?.scrollIntoView({ block: "center" });
    if (frame) {
      frame.remove();
      split.style.gridTemplate = "minmax(0, 1fr) / minmax(0, 1fr)";
      show.setAttribute("aria-pressed", "false");
      place();
      return;
    }
    try {
      original ??= await fetched("application/pdf");
      split.style.gridTemplate = "";
      split.append(h("iframe", { src: `${original}#page=${page ?? 1}`, title: `${found.name}, the original` }));
      show.setAttribute("aria-pressed", "true");
      place();
    } catch (error) {
      showError(error);
    }
  });
  return [show, save];
}
