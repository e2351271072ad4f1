"use strict";
// Draws the charts that charts.py describes, as SVG whose colours are CSS variables: dark mode needs no redrawing.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const SOLID = ["", "7 5", "2 4", "7 4 2 4"];
  const HEIGHTS = { work: 430, labels: 380, association: 340, certainty: 360, graph: 390 };
  const LEFT = 58, RIGHT = 14, TOP = 12, STRIP = 16, TICKS = 22, TITLE = 22, GAP = 26;
  const states = new Map(); // element -> what its reader has chosen

  const paint = (colour) => (colour < 0 ? "var(--faint)" : `var(--c${colour % 8})`);
  const ink = (colour) => (colour < 0 ? "var(--ink)" : `var(--t${colour % 8})`);
  const heat = (share) => (share < 0.5 ? `color-mix(in srgb, var(--heat1) ${share * 200}%, var(--heat0))`
    : `color-mix(in srgb, var(--heat2) ${share * 200 - 100}%, var(--heat1))`);
  const every = (count, most) => Array.from({ length: count }, (_, i) => i).filter((i) => i % Math.ceil(count / most) === 0);
  const written = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(3));

  function make(parent, tag, attributes = {}, text) {
    const node = tag[0] === "<" ? document.createElement(tag.slice(1)) : document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  function short(value) {
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (Math.abs(value) >= size) return +(value / (unit === "k" ? 1e3 : size)).toPrecision(4) + unit;
    }
    return String(+value.toPrecision(6));
  }

  function ticks(low, high, most, whole) {
    const raw = (high - low || 1) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(raw));
    let step = power * [1, 2, 5, 10].find((factor) => power * factor >= raw * 0.999);
    if (whole) step = Math.max(1, Math.round(step));
    const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: Math.max(count, 0) }, (_, i) => +((first + i) * step).toPrecision(12));
  }

  // The values that an axis spans: as asked for, or what there is with a little room.
  function extent(asked, values, fromZero, room) {
    if (asked) return asked;
    let low = Math.min(...values), high = Math.max(...values);
    if (!values.length) [low, high] = [0, 1];
    if (fromZero || low === high) low = Math.min(0, low);
    if (low === high) high = low + 1;
    return [low - (fromZero ? 0 : room * (high - low)), high + room * (high - low)];
  }

  function columnNames(svg, names, strip, box, x, last) {
    const width = box.width / names.length, shown = names.map((name) => name.split(" ")[0]);
    strip?.forEach((colour, i) => make(svg, "rect", {
      x: x(i - 0.5), y: box.top - STRIP + 4, width: width + 0.5, height: 6, style: `fill:${paint(colour)}` }));
    if (last) for (const i of every(names.length, box.width / (8 + 7 * Math.max(...shown.map((name) => name.length))))) {
      make(svg, "text", { x: x(i), y: box.top + box.height + 15, class: "tick middle" }, shown[i]);
    }
  }

  function axes(svg, panel, box, last, shown, all) {
    const xs = all.flatMap((one) => one.x.flat()), ys = shown.flatMap((one) => [one.y, one.low || [], one.high || []].flat(2));
    const bars = all.some((one) => one.kind === "bars");
    let [left, right] = extent(panel.x_range, xs, false, 0);
    if (bars) [left, right] = [left - 0.6, right + 0.6];
    const [bottom, top] = extent(panel.y_range, ys, panel.from_zero || new Set(xs).size === 1, 0.05);
    const x = (value) => box.left + ((value - left) / (right - left)) * box.width;
    const y = (value) => box.top + ((top - value) / (top - bottom)) * box.height;
    const ranks = bottom > top;
    for (const value of ticks(Math.min(bottom, top), Math.max(bottom, top), Math.max(box.height / 32, 2.5), panel.counts)) {
      if (ranks && value < 1) continue;
      if (!ranks) make(svg, "line", { x1: box.left, x2: box.left + box.width, y1: y(value), y2: y(value), class: "rule" });
      make(svg, "text", { x: box.left - 8, y: y(value) + 4, class: "tick end" }, short(value));
    }
    make(svg, "text", { transform: `translate(14 ${box.top + box.height / 2}) rotate(-90)`, class: "axis middle" }, panel.y);
    if (panel.names) columnNames(svg, panel.names, panel.strip, box, x, last);
    else if (last) for (const value of ticks(left, right, box.width / 70, panel.whole)) {
      make(svg, "text", { x: x(value), y: box.top + box.height + 16, class: "tick middle" }, short(value));
    }
    if (last) make(svg, "text", { x: box.left + box.width / 2, y: box.top + box.height + TICKS + 14, class: "axis middle" }, panel.x);
    if (panel.level !== undefined) make(svg, "line", { x1: box.left, x2: box.left + box.width, y1: y(panel.level), y2: y(panel.level), class: "level" });
    return { x, y };
  }

  function drawSeries(svg, one, { x, y }, box) {
    const place = one.x.map((value, i) => [x(value), y(one.y[i])]);
    const look = (i) => `${paint(Array.isArray(one.colour) ? one.colour[i] : one.colour)}`;
    if (one.kind === "links") {
      const d = one.x.map(([a, b], i) => `M${x(a)} ${y(one.y[i][0])}L${x(b)} ${y(one.y[i][1])}`).join("");
      return make(svg, "path", { d, class: "line", style: `stroke:${look(0)};stroke-width:${one.width}` });
    }
    if (one.kind === "bars") {
      const width = Math.min(40, (0.75 * box.width) / place.length);
      return place.forEach(([px, py]) => make(svg, "rect", { x: px - width / 2, y: py, width, height: Math.max(y(0) - py, 0), style: `fill:${look(0)}` }));
    }
    if (one.kind === "dots") {
      return place.forEach(([px, py], i) => {
        if (one.low) make(svg, "line", { x1: px, x2: px, y1: y(one.low[i]), y2: y(one.high[i]), class: "whisker" });
        if (one.sign === "●") make(svg, "circle", { cx: px, cy: py, r: one.size[i] / 2, style: `fill:${look(i)}` });
        else make(svg, "text", { x: px, y: py, class: "sign", style: `fill:${look(i)};font-size:${one.size[i] + 5}px` }, one.sign);
      });
    }
    if (one.low && place.length) {
      const back = one.x.map((value, i) => `${x(value)} ${y(one.low[i])}`).reverse();
      make(svg, "path", { d: `M${one.x.map((value, i) => `${x(value)} ${y(one.high[i])}`).join("L")}L${back.join("L")}Z`, style: `fill:${look(0)};fill-opacity:.16` });
    }
    if (place.length === 1) return make(svg, "circle", { cx: place[0][0], cy: place[0][1], r: 4, style: `fill:${look(0)}` });
    const step = (i) => `H${(place[i - 1][0] + place[i][0]) / 2}V${place[i][1]}`;
    const d = place.map(([px, py], i) => (i && one.kind === "steps" ? step(i) + (i === place.length - 1 ? `H${px}` : "") : `${i ? "L" : "M"}${px} ${py}`)).join("");
    return make(svg, "path", { d, class: "line", style: `stroke:${look(0)};stroke-width:${one.width};stroke-dasharray:${SOLID[one.dash % 4]}` });
  }

  // Where a reader can stop and be told something: points with texts of their own, or all that there is at one x.
  function stopsOf(panel, shown, { x, y }, box) {
    const told = shown.filter((one) => one.told);
    const points = told.filter((one) => one.texts).flatMap((one) => one.texts.map((text, i) => ({ px: x(one.x[i]), py: y(one.y[i]), text })));
    const curves = told.filter((one) => !one.texts);
    const xs = [...new Set(curves.flatMap((one) => one.x))].sort((a, b) => a - b);
    const lines = (value) => curves.flatMap((one) => {
      const i = one.x.indexOf(value);
      return i < 0 ? [] : [`${one.name || panel.y}: ${written(one.y[i])}${one.low ? ` ± ${written(one.high[i] - one.y[i])}` : ""}`];
    });
    return [...points, ...xs.map((value) => ({ px: x(value), box, text: [`${panel.x} ${short(value)}`, ...lines(value)].join("\n") }))];
  }

  function drawPanels(element, chart, state) {
    const svg = canvas(element, state), height = +svg.dataset.height, width = +svg.dataset.width;
    const above = chart[0].strip ? STRIP : 0, room = height - TOP - above - TICKS - TITLE - GAP * (chart.length - 1);
    const parts = chart.length === 2 ? [0.6, 0.4] : chart.map(() => 1 / chart.length);
    let top = TOP + above;
    state.stops = [];
    chart.forEach((panel, index) => {
      const box = { left: LEFT, top, width: width - LEFT - RIGHT, height: room * parts[index] };
      const shown = panel.series.filter((one) => !state.off.has(one.name));
      const scale = axes(svg, panel, box, index === chart.length - 1, shown, chart.flatMap((one) => one.series));
      shown.forEach((one) => drawSeries(svg, one, scale, box));
      state.stops.push(...stopsOf(panel, shown, scale, box));
      top += box.height + GAP;
    });
    state.cursor = make(svg, "line", { class: "cursor", visibility: "hidden" });
    state.ring = make(svg, "circle", { class: "cursor", r: 9, visibility: "hidden" });
  }

  function drawHeat(element, map, state) {
    const svg = canvas(element, state), height = +svg.dataset.height, width = +svg.dataset.width;
    const left = Math.min(LEFT + 12, (map.y ? 32 : 16) + 7 * Math.max(...map.rows.map((name) => name.length)));
    const box = { left, top: TOP + STRIP, width: width - left - RIGHT, height: height - TOP - STRIP - TICKS - TITLE };
    const across = box.width / map.names.length, down = box.height / map.rows.length, gap = map.names.length < 80 ? 1 : 0;
    columnNames(svg, map.names, map.strip, box, (i) => left + (i + 0.5) * across, true);
    for (const row of every(map.rows.length, box.height / 16)) {
      make(svg, "text", { x: left - 8, y: box.top + (row + 0.5) * down + 4, class: "tick end" }, map.rows[row]);
    }
    make(svg, "text", { x: left + box.width / 2, y: height - 6, class: "axis middle" }, "client");
    if (map.y) make(svg, "text", { transform: `translate(14 ${box.top + box.height / 2}) rotate(-90)`, class: "axis middle" }, map.y);
    const cells = map.rows.map((_, row) => map.names.map((_, column) => make(svg, "rect", {
      x: left + column * across, y: box.top + row * down, width: Math.max(across - gap, 0.5), height: Math.max(down - 1, 0.5), class: "cell" })));
    state.ring = make(svg, "circle", { class: "cursor", r: 9, visibility: "hidden" });
    state.show = () => {
      const frame = map.frames[state.frame];
      frame.forEach((row, r) => row.forEach((share, c) => { cells[r][c].style.fill = heat(share / (map.most || 1)); }));
      state.stops = map.names.flatMap((name, c) => map.rows.map((row, r) => ({ px: left + (c + 0.5) * across, py: box.top + (r + 0.5) * down,
        text: `client ${name}, ${map.y ? `${map.y} ` : ""}${row}: ${map.label} ${written(frame[r][c])}` })));
      fillTable(element);
    };
    state.show();
  }

  function drawGraph(element, graph, state) {
    const svg = canvas(element, state), count = graph.client.length;
    svg.setAttribute("viewBox", "-1.12 -1.12 2.24 2.24");
    const radius = Math.max(0.018, Math.min(0.062, 0.3 / Math.sqrt(count))), widest = Math.min(0.03, 0.5 / count + 0.004);
    svg.dataset.widest = widest;
    const lines = graph.edge.map(([a, b, p]) => make(svg, "line", {
      x1: graph.place[a][0], y1: graph.place[a][1], x2: graph.place[b][0], y2: graph.place[b][1],
      "stroke-width": p * widest, "data-a": graph.client[a], "data-b": graph.client[b], class: "edge",
      style: `stroke:${paint(graph.colour[a] === graph.colour[b] ? graph.colour[a] : -1)};stroke-opacity:${0.25 + 0.4 * p}` }));
    const nodes = graph.client.map((client, i) => {
      const node = make(svg, "g", { class: "node", transform: `translate(${graph.place[i][0]} ${graph.place[i][1]})` });
      make(node, "circle", { r: radius, style: `fill:${paint(graph.colour[i])}` });
      if (radius > 0.035) make(node, "text", { style: `fill:${ink(graph.colour[i])}` }, String(client).slice(0, 5));
      return node;
    });
    const size = Math.min(+svg.dataset.width, +svg.dataset.height) / 2.24;
    const at = (axis, whole) => (place) => whole / 2 + place[axis] * size;
    const [px, py] = [at(0, +svg.dataset.width), at(1, +svg.dataset.height)];
    state.stops = graph.client.map((client, i) => ({ px: px(graph.place[i]), py: py(graph.place[i]), text: company(graph, i), client: i }));
    state.look = (stop) => {
      const chosen = stop ? stop.client : null, near = new Set([chosen]);
      graph.edge.forEach(([a, b, p], e) => {
        const mine = chosen === null || a === chosen || b === chosen;
        lines[e].classList.toggle("dim", !mine);
        if (mine && p > 0.05) near.add(a === chosen ? b : a);
      });
      nodes.forEach((node, i) => {
        node.classList.toggle("dim", chosen !== null && !near.has(i));
        node.classList.toggle("chosen", i === chosen);
      });
    };
  }

  function company(graph, i) {
    const shared = graph.edge.filter(([a, b]) => a === i || b === i).map(([a, b, p]) => [a === i ? b : a, p]);
    const most = shared.sort((one, other) => other[1] - one[1]).slice(0, 4).map(([n, p]) => `${graph.client[n]} (${p.toFixed(2)})`);
    return `Client ${graph.client[i]} was mostly with ${most.join(", ") || "nobody"}`;
  }

  function canvas(element, state) {
    element.querySelector("svg")?.remove();
    const width = Math.max(element.clientWidth, 200), height = HEIGHTS[state.shape] || 320;
    const label = document.getElementById(`title-${element.dataset.figure}`).textContent;
    const svg = make(element, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application",
      "aria-label": `${label}: the arrow keys go through its values`, "data-width": width, "data-height": height });
    svg.addEventListener("pointermove", (event) => point(element, state, event));
    svg.addEventListener("pointerdown", (event) => point(element, state, event));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") tell(element, state, null); });
    svg.addEventListener("blur", () => tell(element, state, null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") tell(element, state, null);
      if (!step || !state.stops.length) return;
      event.preventDefault();
      const now = state.stops.findIndex((stop) => stop.text === state.told);
      tell(element, state, state.stops[now < 0 ? (step > 0 ? 0 : state.stops.length - 1) : (now + step + state.stops.length) % state.stops.length]);
    });
    return svg;
  }

  function point(element, state, event) {
    const frame = element.querySelector("svg").getBoundingClientRect();
    const px = event.clientX - frame.left, py = event.clientY - frame.top;
    const inside = ({ box }) => !box || (py > box.top - GAP / 2 && py < box.top + box.height + GAP / 2);
    const far = (stop) => (stop.py === undefined ? Math.abs(stop.px - px) : Math.hypot(stop.px - px, stop.py - py));
    let nearest = null;
    for (const stop of state.stops) if (inside(stop) && (!nearest || far(stop) < far(nearest))) nearest = stop;
    tell(element, state, nearest && (nearest.py === undefined || far(nearest) < 32) ? nearest : null);
  }

  function tell(element, state, stop) {
    const tip = element.querySelector(".tip"), told = element.parentElement.querySelector(".told");
    if ((stop?.text ?? null) === state.told) return;
    state.told = stop?.text ?? null;
    told.textContent = state.told ?? "";
    if (state.look) return state.look(stop);
    tip.hidden = !stop;
    const ringed = stop && stop.py !== undefined;
    state.ring.setAttribute("visibility", ringed ? "visible" : "hidden");
    state.cursor?.setAttribute("visibility", stop && !ringed ? "visible" : "hidden");
    if (!stop) return;
    if (ringed) { state.ring.setAttribute("cx", stop.px); state.ring.setAttribute("cy", stop.py); }
    else for (const [key, value] of Object.entries({ x1: stop.px, x2: stop.px, y1: stop.box.top, y2: stop.box.top + stop.box.height })) state.cursor.setAttribute(key, value);
    tip.textContent = stop.text;
    const left = stop.px + 14 + tip.offsetWidth > element.clientWidth ? stop.px - 14 - tip.offsetWidth : stop.px + 14;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, (stop.py ?? stop.box.top + 20) - 12)}px`;
  }

  function legend(element, chart, state) {
    const named = chart.map((panel) => panel.series.filter((one) => one.name)).filter((series) => series.length > 1).flat();
    if (!named.length) return;
    const box = document.createElement("div");
    box.className = "legend";
    element.before(box);
    for (const one of named) {
      const button = make(box, "<button", { type: "button", "aria-pressed": "true" });
      const sign = one.kind === "dots" ? one.sign : one.dash % 4 ? "╌" : "━";
      make(button, "<i", { style: `color:${paint(one.colour)}`, "aria-hidden": "true" }, sign);
      button.append(one.name);
      button.addEventListener("click", () => {
        if (!state.off.delete(one.name)) state.off.add(one.name);
        button.setAttribute("aria-pressed", String(!state.off.has(one.name)));
        tell(element, state, null);
        drawPanels(element, chart, state);
      });
    }
  }

  function slider(element, map, state) {
    const box = element.parentElement.querySelector(".slider");
    const scale = document.createElement("div");
    scale.className = "scale";
    scale.append("0", make(scale, "<i"), `${map.most || 1} ${map.label}`);
    element.after(scale);
    if (!box) return;
    const input = box.querySelector("input"), output = box.querySelector("output"), button = box.querySelector("button");
    const show = () => {
      state.frame = +input.value;
      output.textContent = `round ${map.rounds[state.frame]}`;
      tell(element, state, null);
      state.show();
    };
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; button.textContent = "▶"; button.ariaLabel = "play"; };
    input.addEventListener("input", show);
    input.addEventListener("pointerdown", stop);
    button.addEventListener("click", () => {
      if (timer) return stop();
      if (+input.value === map.frames.length - 1) input.value = 0;
      show();
      button.textContent = "❚❚";
      button.ariaLabel = "pause";
      timer = setInterval(() => {
        input.value = +input.value + 1;
        show();
        if (+input.value === map.frames.length - 1) stop();
      }, Math.max(60, Math.min(400, 9000 / map.frames.length)));
    });
  }

  // What a figure shows, in rows: head first.
  function rowsOf(content, state) {
    if (!Array.isArray(content)) return [["client", "shared a cluster most with"], ...content.client.map((client, i) => [client, company(content, i)])];
    if (content[0].frames) {
      const [map] = content, frame = map.frames[state.frame];
      return [["client", ...map.rows.map((row) => `${map.y} ${row}`)], ...map.names.map((name, c) => [name, ...frame.map((row) => row[c])])];
    }
    const told = content.flatMap((panel) => panel.series.filter((one) => one.told).map((one) => [panel, one]));
    if (told.some(([, one]) => one.texts)) return [["what", "values"], ...told.flatMap(([panel, one]) => one.texts.map((text) => [one.name || panel.y, text]))];
    const xs = [...new Set(told.flatMap(([, one]) => one.x))].sort((a, b) => a - b);
    const heads = told.flatMap(([panel, one]) => [one.name || panel.y, ...(one.low ? ["±"] : [])]);
    const at = (one, i) => (i < 0 ? (one.low ? ["", ""] : [""]) : [one.y[i], ...(one.low ? [+(one.high[i] - one.y[i]).toFixed(4)] : [])]);
    return [[content[0].x, ...heads], ...xs.map((x) => [x, ...told.flatMap(([, one]) => at(one, one.x.indexOf(x)))])];
  }

  function fillTable(element) {
    const details = element.parentElement.querySelector(".numbers");
    details.querySelector(".scroll")?.remove();
    if (!details.open) return;
    const table = make(make(details, "<div", { class: "scroll", tabindex: 0 }), "<table");
    const [head, ...rows] = rowsOf(figures[element.dataset.figure], states.get(element));
    const top = make(make(table, "<thead"), "<tr"), body = make(table, "<tbody");
    head.forEach((text) => make(top, "<th", { scope: "col" }, text));
    rows.forEach((row) => {
      const line = make(body, "<tr");
      row.forEach((value, i) => make(line, i ? "<td" : "<th", i ? {} : { scope: "row" }, value));
    });
  }

  function draw(element) {
    const content = figures[element.dataset.figure], isNew = !states.has(element);
    if (isNew) {
      const shape = element.dataset.figure.replace(/-\d+$/, "");
      states.set(element, { shape, off: new Set(), stops: [], told: null, frame: (content[0]?.frames?.length || 1) - 1 });
      make(element, "<div", { class: "tip", hidden: "" });
    }
    const state = states.get(element);
    state.width = element.clientWidth;
    if (!Array.isArray(content)) drawGraph(element, content, state);
    else if (content[0].frames) drawHeat(element, content[0], state);
    else drawPanels(element, content, state);
    if (!isNew) return;
    if (Array.isArray(content) && content[0].frames) slider(element, content[0], state);
    else if (Array.isArray(content)) legend(element, content, state);
    element.parentElement.querySelector(".numbers").addEventListener("toggle", () => fillTable(element));
    widths.observe(element);
  }

  const widths = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (target.clientWidth && target.clientWidth !== states.get(target).width) draw(target);
  }));

  // One figure a frame: the page can be read and scrolled while the rest is drawn.
  function drawMissing() {
    const next = [...document.querySelectorAll("[data-figure]")].find((one) => !one.closest("[hidden]") && !states.has(one));
    if (!next) { document.body.dataset.drawn = "yes"; return; }
    draw(next);
    requestAnimationFrame(drawMissing);
  }

  const chooser = document.getElementById("run");
  chooser?.addEventListener("change", () => {
    document.body.dataset.drawn = "no";
    document.querySelectorAll(".run").forEach((run) => { run.hidden = run.dataset.run !== chooser.value; });
    drawMissing();
  });
  drawMissing();
})();
