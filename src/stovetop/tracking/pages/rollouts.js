// Draws the tokens of a rollout when its view is opened. All text is set as text, never as HTML.
"use strict";
(() => {
  const MODES = {
    advantage: "advantage (green: more of this, red: less)",
    sampler: "sampler: -logprob, whose mean is the entropy (orange: not expected)",
    trainer: "trainer: -logprob before the update",
    mismatch: "mismatch: trainer minus sampler (blue: more, red: less)",
  };
  const KINDS = ["observed", "trained", "sampled", "anew"];
  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const size = new DataView(buffer).getUint32(0, true);
    const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    let at = 4 + size;
    for (const [name, length] of Object.entries(data.lengths)) {
      const [low, high] = [new Uint8Array(buffer, at, length), new Int8Array(buffer, at + length, length)];
      data[name] = Array.from(low, (byte, place) => high[place] * 256 + byte);
      at += 2 * length;
    }
    return data;
  };
  const scaled = (values, unit) => Array.from(values, (value) => (value === -32768 ? null : value / unit));
  const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value || 0)), 0);
  const add = (parent, tag, words, text) => {
    const element = parent.appendChild(document.createElement(tag));
    Object.assign(element, words || {});
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const colour = (rgb, alpha) => (alpha > 0.02 ? `rgb(${rgb} / ${Math.min(alpha, 1) * 0.75})` : "");
  const signed = (value, most, above, below) =>
    value === null || value === undefined ? "" : colour(value > 0 ? above : below, Math.abs(value) / most);
  const COLOURS = {
    advantage: (data, at) => signed(data.advantage[at], data.most.advantage, "40 160 80", "215 60 50"),
    sampler: (data, at) => (data.sampler[at] == null ? "" : colour("230 140 20", -data.sampler[at] / 5)),
    trainer: (data, at) => (data.trainer[at] == null ? "" : colour("230 140 20", -data.trainer[at] / 5)),
    mismatch: (data, at) => signed(data.mismatch[at], data.most.mismatch, "60 120 220", "215 60 50"),
  };
  const number = (value, digits) => (value === null || value === undefined ? "not known" : value.toFixed(digits));
  const draw = async (view) => {
    const data = await unpack(view.querySelector("script").textContent);
    data.sampler = scaled(data.sampler, 1e3);
    data.advantage = scaled(data.advantage, 1e3 / data.most);
    data.mismatch = scaled(data.mismatch, 1e4);
    data.trainer = data.mismatch.map((value, at) => (value === null ? null : data.sampler[at] + value));
    data.most = { advantage: largest(data.advantage) || 1, mismatch: Math.max(largest(data.mismatch), 0.01) };
    const label = add(view, "label", {}, "colour: ");
    const select = add(label, "select");
    for (const [mode, text] of Object.entries(MODES)) {
      add(select, "option", { value: mode, disabled: data[mode].length === 0 }, text);
    }
    select.value = data.advantage.length ? "advantage" : "sampler";
    const told = add(view, "p", { className: "told" }, "point at a token");
    const text = add(view, "div", { className: "text" });
    const spans = [];
    let sampled = 0;
    data.kinds.forEach((kind, place) => {
      const piece = kind === 3 ? "here the context begins anew" : data.tokens[data.which[place] & 65535][1].replace(/\n/g, "↵\n");
      const span = add(text, "span", { className: KINDS[kind] }, piece);
      const at = kind === 1 || kind === 2 ? sampled++ : null;
      const about = [`token ${place}`, `id ${data.tokens[data.which[place] & 65535][0]}`, KINDS[kind]];
      if (at !== null) {
        about.push(`sampler ${number(data.sampler[at], 3)}`, `trainer ${number(data.trainer[at], 3)}`);
        about.push(`mismatch ${number(data.mismatch[at], 4)}`, `advantage ${number(data.advantage[at], 3)}`);
        spans.push([span, at]);
      }
      span.dataset.about = about.join(", ");
    });
    const paint = () => spans.forEach(([span, at]) => (span.style.backgroundColor = COLOURS[select.value](data, at)));
    select.addEventListener("change", paint);
    text.addEventListener("pointerover", (event) => {
      if (event.target.dataset.about) told.textContent = event.target.dataset.about;
    });
    paint();
  };
  document.addEventListener(
    "toggle",
    (event) => {
      const view = event.target;
      if (!(view instanceof HTMLDetailsElement) || !view.classList.contains("tokens") || !view.open) return;
      if (view.dataset.drawn) return;
      view.dataset.drawn = "yes";
      draw(view).catch((error) => add(view, "p", {}, `the tokens cannot be shown: ${error}`));
    },
    true,
  );
})();
