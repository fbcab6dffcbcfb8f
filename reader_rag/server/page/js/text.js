// Positions in text. The server counts Unicode code points, JavaScript strings UTF-16 code units.

/**
 * Converts positions from code points to code units.
 * @param {string} text
 * @param {number[]} positions In code points, in any order.
 * @returns {number[]} In code units; a position behind the end becomes the end.
 */
export function codeUnits(text, positions) {
  const order = positions.map((_, index) => index).sort((a, b) => positions[a] - positions[b]);
  const found = new Array(positions.length);
  let unit = 0;
  let point = 0;
  for (const index of order) {
    while (point < positions[index] && unit < text.length) {
      unit += text.codePointAt(unit) > 0xffff ? 2 : 1;
      point += 1;
    }
    found[index] = unit;
  }
  return found;
}

/**
 * Where an annotation's URL points to in a document.
 * @param {string} url
 * @returns {{document: string, version: string|null, start: number|null, end: number|null}|null} Positions in code
 *   points; null where the URL is no place in a document of this server.
 */
export function placeOf(url) {
  const hash = String(url ?? "").split("#").slice(1).join("#");
  const match = /^\/documents\/([^/?]+)(?:\?(.*))?$/.exec(hash);
  if (!match) return null;
  const query = new URLSearchParams(match[2] ?? "");
  const number = (name) => (/^\d{1,15}$/.test(query.get(name) ?? "") ? Number(query.get(name)) : null);
  let document;
  try {
    document = decodeURIComponent(match[1]);
  } catch {
    return null; // a broken escape
  }
  return { document, version: query.get("v"), start: number("start"), end: number("end") };
}

/** The page's own address of a place in a document. */
export function placeHash({ document, version, start, end }) {
  const query = new URLSearchParams();
  if (version) query.set("v", version);
  if (start !== null && start !== undefined) query.set("start", start);
  if (end !== null && end !== undefined) query.set("end", end);
  return `#/documents/${encodeURIComponent(document)}${query.size ? `?${query}` : ""}`;
}
