// A small subset of Markdown: paragraphs, headings, lists, quotes, code, bold and italic. It is parsed into positions of
// the source, never into markup, so that annotations keep their places and a document's text cannot become an element.

/**
 * @typedef {{start: number, end: number, style: ""|"strong"|"em"|"code"}} Run Positions in the source.
 * @typedef {{type: "p"|"h3"|"item"|"blockquote"|"pre", runs: Run[], bullet?: string, depth?: number}} Block
 */

const FENCE = /^ {0,3}(```|~~~)/;
const HEADING = /^ {0,3}#{1,6}[ \t]+/;
const ITEM = /^([ \t]*)([-*+•]|\d{1,9}[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const STYLED = /(`+)(?!`)([^\n]{1,2000}?[^`\n]|[^`\n])\1(?!`)|\*\*(?=[^\s*])([^\n]{0,2000}?[^\s*])\*\*(?!\*)|(?<![\w*])\*(?=[^\s*])([^*\n]{0,2000}?[^\s*])\*(?![\w*])/g;

/**
 * Parses a text.
 * @param {string} source
 * @returns {Block[]}
 */
export function parse(source) {
  const blocks = [];
  let open = null; // the paragraph, item or quote that a next line continues
  let fence = null;
  for (const [start, end] of lines(source)) {
    const line = source.slice(start, end);
    if (fence) {
      if (line.trim() === fence.mark) fence = null;
      else extend(fence.block, start, end);
      continue;
    }
    const opened = FENCE.exec(line);
    if (opened) {
      fence = { mark: opened[1], block: { type: "pre", lines: [] } };
      blocks.push(fence.block);
      open = null;
      continue;
    }
    if (!line.trim()) {
      open = null;
      continue;
    }
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    const quote = QUOTE.exec(line);
    if (heading) {
      blocks.push({ type: "h3", lines: [[start + heading[0].length, end]] });
      open = null;
    } else if (item) {
      const bullet = /\d/.test(item[2]) ? item[2] : "•";
      const depth = Math.min(2, Math.floor(item[1].replace(/\t/g, "    ").length / 2));
      open = { type: "item", bullet, depth, lines: [[start + item[0].length, end]] };
      blocks.push(open);
    } else if (quote) {
      if (open?.type !== "blockquote") blocks.push((open = { type: "blockquote", lines: [] }));
      open.lines.push([start + quote[0].length, end]);
    } else if (open && open.type !== "blockquote") {
      open.lines.push([start + (open.type === "item" ? indent(line) : 0), end]);
    } else {
      blocks.push((open = { type: "p", lines: [[start, end]] }));
    }
  }
  return blocks.map(({ lines: stretches, ...block }) => ({ ...block, runs: runsOf(source, stretches, block.type) }));
}

function* lines(source) {
  let start = 0;
  while (start < source.length) {
    const found = source.indexOf("\n", start);
    const end = found < 0 ? source.length : found;
    yield [start, end];
    start = end + 1;
  }
}

const indent = (line) => line.length - line.trimStart().length;
const extend = (block, start, end) => block.lines.push([start, end]);

/** The styled runs of a block's lines; the line break before each line but the first belongs to it. */
function runsOf(source, stretches, type) {
  const runs = [];
  stretches.forEach(([start, end], index) => {
    if (index) runs.push({ start: stretches[index - 1][1], end: stretches[index - 1][1] + 1, style: "" });
    if (type === "pre") runs.push({ start, end, style: "" });
    else runs.push(...inline(source, start, end));
  });
  return runs.filter((run) => run.end > run.start);
}

function inline(source, start, end) {
  const runs = [];
  let at = start;
  for (const match of source.slice(start, end).matchAll(STYLED)) {
    const [style, inner] = match[2] !== undefined ? ["code", match[2]] : match[3] !== undefined ? ["strong", match[3]] : ["em", match[4]];
    const marks = (match[0].length - inner.length) / 2;
    const from = start + match.index;
    runs.push({ start: at, end: from, style: "" }, { start: from + marks, end: from + marks + inner.length, style });
    at = from + match[0].length;
  }
  runs.push({ start: at, end, style: "" });
  return runs;
}
