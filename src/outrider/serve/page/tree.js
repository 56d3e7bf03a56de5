"use strict";
// A round's tree as SVG: the root at the left, a column per depth, the accepted path in colour.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function word(text) {
  const shown = text.replace(/\n/g, "⏎").replace(/ /g, "·");
  return shown.length > 14 ? shown.slice(0, 13) + "…" : shown || "∅";
}

function drawTree(tree) {
  const kids = tree.tokens.map(() => []);
  const depth = [0];
  for (let i = 1; i < tree.tokens.length; i++) {
    kids[tree.parents[i]].push(i);
    depth[i] = depth[tree.parents[i]] + 1;
  }
  const on = new Set(tree.path);
  for (const list of kids) list.sort((a, b) => on.has(b) - on.has(a));
  const widest = [];
  tree.tokens.forEach((token, i) => { widest[depth[i]] = Math.max(widest[depth[i]] || 0, word(token).length); });
  const left = [8];
  widest.forEach((chars, d) => { left[d + 1] = left[d] + chars * 7.4 + 30; });
  const place = [];
  let line = 0;
  const lay = (node) => {
    place[node] = line;
    kids[node].forEach((kid, k) => { if (k) line += 1; lay(kid); });
  };
  lay(0);
  const y = (node) => 16 + 19 * place[node];
  const picture = svg("svg", { width: left[widest.length], height: 19 * (line + 1) + 10, role: "img" });
  const edges = tree.tokens.map((token, i) => i).slice(1).sort((a, b) => on.has(a) - on.has(b)); // accepted on top
  for (const i of edges) {
    const from = tree.parents[i];
    const x1 = left[depth[from]] + word(tree.tokens[from]).length * 7.4 + 3;
    const x2 = left[depth[i]] - 4;
    const middle = x2 - 10;
    const line = `M${x1} ${y(from) - 4} H${middle - 6} C${middle} ${y(from) - 4} ${middle - 6} ${y(i) - 4} ${x2} ${y(i) - 4}`;
    svg("path", { d: line, class: on.has(i) ? "on" : "" }, picture);
  }
  tree.tokens.forEach((token, i) => {
    const group = svg("g", { class: i === 0 ? "root" : on.has(i) ? "on" : "" }, picture);
    svg("text", { x: left[depth[i]], y: y(i) }, group).textContent = word(token);
  });
  return picture;
}
