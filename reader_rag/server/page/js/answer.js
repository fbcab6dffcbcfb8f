// Draws an answer: its text, with each copied span as a link in its source's colour.

import { h } from "./dom.js";
import { parse } from "./markdown.js";
import { codeUnits, placeHash, placeOf } from "./text.js";

export const COLOURS = 6;

/**
 * @typedef {{key: string, number: number, colour: number, title: string, page: number|null, href: string,
 *   spans: Span[]}} Source A document that an answer copied from.
 * @typedef {{start: number, end: number, source: Source, href: string, place: Object, text: string}} Span A copied span;
 *   positions in code units of the answer.
 */

/**
 * The copied spans of an answer and the documents they are from, in the answer's order.
 * @param {string} content
 * @param {Object[]} annotations As the API gives them, with positions in code points.
 * @returns {{spans: Span[], sources: Source[]}}
 */
export function citations(content, annotations) {
  const given = (annotations ?? [])
    .map((annotation) => annotation?.url_citation)
    .filter((one) => one && Number.isInteger(one.start_index) && one.end_index > one.start_index);
  const units = codeUnits(content, given.flatMap((one) => [one.start_index, one.end_index]));
  const spans = [];
  const sources = new Map();
  given
    .map((one, index) => ({ one, start: units[2 * index], end: units[2 * index + 1] }))
    .sort((a, b) => a.start - b.start)
    .forEach(({ one, start, end }) => {
      const place = placeOf(one.url);
      const before = spans.at(-1)?.end ?? 0;
      if (!place || start < before || end <= start) return;
      if (!sources.has(place.document)) {
        const number = sources.size + 1;
        const colour = sources.size % COLOURS;
        const title = (one.title || "Untitled").replace(/(\.pdf), page .+$/i, "$1"); // its spans may be on several pages
        sources.set(place.document, { key: place.document, number, colour, title, spans: [] });
      }
      const source = sources.get(place.document);
      const span = { start, end, source, place, href: placeHash(place), text: content.slice(start, end) };
      source.spans.push(span);
      spans.push(span);
    });
  return { spans, sources: [...sources.values()] };
}

/**
 * Draws an answer into an element.
 * @param {HTMLElement} target
 * @param {string} content
 * @param {Span[]} spans In the answer's order, not overlapping.
 */
export function drawAnswer(target, content, spans = []) {
  const nodes = [];
  for (const block of parse(content)) {
    const into = h(block.type === "pre" ? "code" : block.type === "item" ? "span" : block.type);
    for (const run of block.runs) drawRun(into, content, run, spans);
    if (block.type === "item") {
      if (nodes.at(-1)?.tagName !== "UL") nodes.push(h("ul"));
      nodes.at(-1).append(h("li", { class: "item", data: { bullet: block.bullet, depth: block.depth } }, into));
    } else {
      nodes.push(block.type === "pre" ? h("pre", { tabindex: "0" }, into) : into);
    }
  }
  target.replaceChildren(...nodes);
  markEnds(target, spans);
}

function drawRun(parent, content, run, spans) {
  const into = run.style ? parent.appendChild(h(run.style)) : parent;
  let at = run.start;
  for (const [index, span] of spans.entries()) {
    if (span.end <= run.start || span.start >= run.end) continue;
    const from = Math.max(span.start, run.start);
    const to = Math.min(span.end, run.end);
    if (from > at) into.append(content.slice(at, from));
    into.append(link(span, index, content.slice(from, to)));
    at = to;
  }
  if (at < run.end) into.append(content.slice(at, run.end));
}

function link(span, index, text) {
  const { source } = span;
  return h("a", { class: "copied", href: span.href, title: `Copied from ${source.title}`, text, data: { source: source.colour, span: index } });
}

/** A span that styles cut into several links is one stop of the keyboard, and carries its number once, at its end. */
function markEnds(target, spans) {
  const links = [...target.querySelectorAll("a.copied")];
  links.forEach((node, index) => {
    const span = node.dataset.span;
    if (links[index - 1]?.dataset.span === span) node.tabIndex = -1;
    if (links[index + 1]?.dataset.span !== span) node.dataset.number = spans[Number(span)].source.number;
  });
}

/** The line of figures below an answer; empty where the server gave none. */
export function figures(reader) {
  if (!reader) return "";
  const parts = [];
  if (reader.tokens_per_second > 0) parts.push(`${round(reader.tokens_per_second)} tokens/s`);
  if (reader.tokens_per_step > 0) parts.push(`${round(reader.tokens_per_step)} tokens per step`);
  if (reader.completion_tokens > 0 && reader.copied_tokens !== null && reader.copied_tokens !== undefined) {
    parts.push(`${Math.round((100 * reader.copied_tokens) / reader.completion_tokens)} % copied`);
  }
  return parts.join(" · ");
}

/** A figure with as many digits as mean something. */
export const round = (value) => (value >= 20 ? String(Math.round(value)) : value.toFixed(1));
