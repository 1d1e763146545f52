// Tells the numbers under the pointer, from the points that are drawn: the page can be read without.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const short = (number) => Number.isInteger(number) ? String(number) : String(Number(number.toPrecision(4)));

  function points(group) {
    const found = [];
    for (const path of group.querySelectorAll(":scope > path"))
      for (const [, x, y] of path.getAttribute("d").matchAll(/[ML] (-?[\d.]+) (-?[\d.]+)/g)) found.push([Number(x), Number(y)]);
    return found;
  }

  function scales(svg) {
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const [x0, x1, y0, y1] = svg.dataset.limits.split(" ").map(Number);
    const [left, right, bottom, top] = svg.dataset.place.split(" ").map(Number);
    const isLog = svg.dataset.log === "1";
    const [low, high] = isLog ? [Math.log10(y0), Math.log10(y1)] : [y0, y1];
    return {
      top: height * (1 - top), bottom: height * (1 - bottom),
      step: (x) => x0 + (x / width - left) / (right - left) * (x1 - x0),
      value: (y) => {
        const value = low + (1 - y / height - bottom) / (top - bottom) * (high - low);
        return isLog ? 10 ** value : value;
      },
    };
  }

  for (const figure of document.querySelectorAll("figure.plot")) {
    const svg = figure.querySelector("svg"), output = figure.querySelector("output");
    let lines = null, scale = null, cursor = null;
    svg.addEventListener("pointermove", (event) => {
      if (lines === null) {
        scale = scales(svg);
        lines = [...svg.querySelectorAll("g.line, g.smooth")].map((group) => ({ name: group.dataset.label, kind: group.getAttribute("class"), points: points(group) }));
        cursor = svg.appendChild(document.createElementNS(SVG, "line"));
        cursor.setAttribute("class", "cursor");
      }
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const words = [];
      let nearest = null;
      for (const line of lines) {
        if (line.points.length === 0) continue;
        const point = line.points.reduce((best, each) => Math.abs(each[0] - at.x) < Math.abs(best[0] - at.x) ? each : best);
        nearest = nearest ?? point[0];
        const name = lines.some((other) => other.name !== line.name) ? line.name + " " : "";
        words.push(`${name}${line.kind === "smooth" ? "mean " : ""}${short(scale.value(point[1]))}`);
      }
      if (nearest === null) return;
      for (const [name, value] of Object.entries({ x1: nearest, x2: nearest, y1: scale.top, y2: scale.bottom })) cursor.setAttribute(name, value);
      cursor.removeAttribute("visibility");
      output.textContent = [`step ${Math.round(scale.step(nearest))}`, ...words].join("\n");
      output.classList.add("on");
    });
    svg.addEventListener("pointerleave", () => {
      output.classList.remove("on");
      if (cursor !== null) cursor.setAttribute("visibility", "hidden");
    });
  }

  for (const figure of document.querySelectorAll("figure.chart")) {
    const output = figure.querySelector("output");
    figure.addEventListener("pointerover", (event) => {
      const bar = event.target.closest("g.bar");
      output.textContent = bar === null ? "" : bar.dataset.label;
      output.classList.toggle("on", bar !== null);
    });
  }
})();
