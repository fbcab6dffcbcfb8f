// The panel beside an answer: the documents it copied from with each copied span, and what was retrieved besides.

import { el, h } from "./dom.js";
import { placeHash, placeOf } from "./text.js";

/**
 * Draws the sources of an answer into the side panel.
 * @param {{spans: import("./answer.js").Span[], sources: import("./answer.js").Source[]}} cited
 * @param {Object|null} reader What the server tells besides the answer.
 * @param {() => void} onclose
 */
export function drawSources(cited, reader, onclose) {
  const rest = notCopied(cited, reader?.passages ?? []);
  el("side").setAttribute("aria-label", "Sources");
  el("side").replaceChildren(
    h(
      "div",
      { class: "side-bar" },
      h("h2", { text: "Sources", tabindex: "-1" }),
      h("button", { type: "button", class: "icon", "aria-label": "Close the sources", text: "✕", onclick: onclose }),
    ),
    h("div", { class: "side-body", tabindex: "0", role: "region", "aria-label": "List of sources" }, copied(cited), retrieved(rest, cited)),
  );
}

function copied({ sources, spans }) {
  if (!sources.length) return null;
  return h(
    "section",
    { class: "sources-group" },
    h("h3", { text: "Copied into the answer" }),
    h(
      "ul",
      {},
      ...sources.map((source) =>
        h(
          "li",
          { class: "source", data: { source: source.colour } },
          h("p", { class: "source-title" }, h("span", { class: "number", text: source.number }), h("span", { text: source.title })),
          h(
            "div",
            { class: "quotes" },
            ...source.spans.map((span) =>
              h("a", { href: span.href, text: span.text.trim(), data: { span: spans.indexOf(span) }, title: "Open at these characters" }),
            ),
          ),
        ),
      ),
    ),
  );
}

function retrieved(passages, { sources }) {
  if (!passages.length) return null;
  const note = sources.length
    ? "The model read these passages too."
    : "The model read these passages; nothing in the answer is a copy of them.";
  return h(
    "section",
    { class: "sources-group" },
    h("h3", { text: "Retrieved, not copied" }),
    h("p", { class: "quiet", text: note }),
    h(
      "ul",
      {},
      ...passages.map((passage) => {
        const place = placeOf(passage.url) ?? (passage.document_id ? { document: passage.document_id } : null);
        const title = passage.title || "Untitled";
        return h(
          "li",
          { class: "source" },
          h("p", { class: "source-title" }, place ? h("a", { href: placeHash(place), text: title }) : h("span", { text: title })),
          h("p", { class: "source-meta", text: meta(passage) }),
        );
      }),
    ),
  );
}

const meta = (passage) => (typeof passage.score === "number" ? `similarity ${passage.score.toFixed(2)}` : "");

/** The passages that no copied span lies in. */
export function notCopied({ spans }, passages) {
  return passages.filter((passage) => {
    const place = placeOf(passage.url);
    const id = place?.document ?? passage.document_id;
    return !spans.some((span) => {
      if (span.place.document !== id) return false;
      if (place === null || place.start === null || place.end === null) return true;
      return span.place.start < place.end && place.start < span.place.end;
    });
  });
}

/** Lights a copied span up in the answer and in the panel while the pointer or the focus is on either. */
export function lightSpans(root) {
  const light = (event, on) => {
    const node = event.target instanceof Element ? event.target.closest("[data-span]") : null;
    if (!node) return;
    const answer = root.querySelector(".answer.selected");
    if (node.closest(".answer") && node.closest(".answer") !== answer) return;
    const same = `[data-span="${CSS.escape(node.dataset.span)}"]`;
    for (const other of [...(answer?.querySelectorAll(same) ?? []), ...el("side").querySelectorAll(same)]) {
      other.classList.toggle("lit", on);
    }
  };
  for (const [name, on] of [["pointerover", true], ["pointerout", false], ["focusin", true], ["focusout", false]]) {
    root.addEventListener(name, (event) => light(event, on));
  }
}
