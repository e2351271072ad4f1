"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 760px)");
  const drawn = new Set();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // "--c0" is the colour of that variable, "--c0/0.2" the same at a fifth of its opacity.
  function paint(token) {
    const [name, opacity] = token.split("/");
    const hex = css(name);
    if (!opacity) return hex;
    const part = (i) => parseInt(hex.slice(i, i + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${opacity})`;
  }

  function painted(value) {
    if (typeof value === "string") return value.startsWith("--") ? paint(value) : value;
    if (Array.isArray(value)) return typeof value[value.length - 1] === "number" ? value : value.map(painted);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
    }
    return value;
  }

  function themed(layout) {
    const own = painted(layout);
    const axis = {
      gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), automargin: true, ticks: "",
      tickfont: { color: css("--muted"), size: 11 },
    };
    const result = {
      font: { family: css("--sans"), size: 12, color: css("--soft") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, align: "left" },
      legend: {
        orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 },
        // Many short names stand in two columns on a phone, where Plotly by itself would make one.
        ...(narrow.matches && own.meta === "short names" ? { entrywidth: 100 } : {}),
      },
      // Fingers scroll the page; a mouse may zoom (double click goes back).
      dragmode: matchMedia("(hover: hover)").matches ? "zoom" : false,
      bargap: 0.25, ...own,
      margin: { l: 8, r: 8, t: own.showlegend ? 36 : 10, b: 8, ...(own.margin || {}) },
    };
    for (const key of Object.keys(own)) {
      if (!/^[xy]axis/.test(key)) continue;
      result[key] = { ...axis, ...own[key] };
      if (result[key].title) result[key].title = { ...result[key].title, standoff: 8, font: { size: 12 } };
      // A mouse zooms into rounds; dragging a heat map's rows out of sight helps nobody.
      if (key !== "xaxis") result[key].fixedrange = true;
    }
    return result;
  }

  function traces(figure) {
    return painted(figure.data).map((trace) => {
      if (trace.colorbar) {
        trace.colorbar = narrow.matches
          ? { ...trace.colorbar, orientation: "h", y: -0.24, yanchor: "top", x: 0.5, len: 0.6, thickness: 8, title: { ...trace.colorbar.title, side: "top" } }
          : trace.colorbar;
        trace.colorbar.tickfont = { size: 11, color: css("--muted") };
      }
      if (narrow.matches && Array.isArray(trace.marker?.size)) trace.marker.size = trace.marker.size.map((s) => s * 0.6);
      return trace;
    });
  }

  const settings = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };

  function drawPlot(element, figure) {
    return Plotly.react(element, traces(figure), themed(figure.layout), settings);
  }

  function drawHeat(element) {
    const { figure, rounds, frames } = figures[element.dataset.figure];
    const box = element.parentElement;
    const slider = box.querySelector("input");
    const shown = { data: [{ ...figure.data[0], z: frames[+slider.value] }], layout: figure.layout };
    const done = drawPlot(element, shown);
    if (drawn.has(element)) return done;
    const told = box.querySelector("output");
    const show = () => {
      told.textContent = `round ${rounds[+slider.value]}`;
      Plotly.restyle(element, { z: [frames[+slider.value]] });
    };
    slider.addEventListener("input", show);
    const button = box.querySelector("button");
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; button.textContent = "▶"; button.ariaLabel = "play"; };
    slider.addEventListener("pointerdown", stop);
    button.addEventListener("click", () => {
      if (timer) return stop();
      if (+slider.value === frames.length - 1) slider.value = 0;
      show();
      button.textContent = "❚❚";
      button.ariaLabel = "pause";
      timer = setInterval(() => {
        slider.value = +slider.value + 1;
        show();
        if (+slider.value === frames.length - 1) stop();
      }, Math.max(60, Math.min(400, 9000 / frames.length)));
    });
    return done;
  }

  const NS = "http://www.w3.org/2000/svg";
  function add(parent, tag, attributes) {
    const node = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
    return node;
  }

  // The graph is plain SVG: its colours are CSS variables, so dark mode needs no redrawing.
  function drawGraph(element) {
    const graph = figures[element.dataset.figure];
    const count = graph.client.length;
    const radius = Math.max(0.018, Math.min(0.062, 0.3 / Math.sqrt(count)));
    const widest = Math.min(0.03, 0.5 / count + 0.004);
    const variable = (c) => (c < 0 ? "var(--muted)" : `var(--c${c % 8})`);
    const svg = add(element, "svg", { viewBox: "-1.12 -1.12 2.24 2.24" });
    const lines = graph.edge.map(([a, b, p]) => add(svg, "line", {
      x1: graph.place[a][0], y1: graph.place[a][1], x2: graph.place[b][0], y2: graph.place[b][1],
      "stroke-width": p * widest, "data-strength": p, "data-a": graph.client[a], "data-b": graph.client[b],
      style: `stroke:${graph.colour[a] === graph.colour[b] ? variable(graph.colour[a]) : "var(--muted)"};stroke-opacity:${0.25 + 0.4 * p}`,
    }));
    svg.dataset.widest = widest;
    const told = element.parentElement.querySelector(".told");
    const nodes = graph.client.map((client, i) => {
      const node = add(svg, "g", { class: "node", transform: `translate(${graph.place[i][0]} ${graph.place[i][1]})` });
      add(node, "circle", { r: radius, style: `fill:${variable(graph.colour[i])}` });
      if (radius > 0.035) add(node, "text", {}).textContent = client;
      return node;
    });
    function look(i) {
      const near = new Map();
      lines.forEach((line, e) => {
        const [a, b, p] = graph.edge[e];
        const mine = i === null || a === i || b === i;
        line.classList.toggle("dim", !mine);
        if (i !== null && mine) near.set(a === i ? b : a, p);
      });
      nodes.forEach((node, n) => node.classList.toggle("dim", i !== null && n !== i && !(near.get(n) > 0.05)));
      if (i === null) { told.textContent = "\u00a0"; return; }
      const most = [...near].sort((x, y) => y[1] - x[1]).slice(0, 4).map(([n, p]) => `${graph.client[n]} (${p.toFixed(2)})`);
      told.textContent = `Client ${graph.client[i]} was mostly with ${most.join(", ") || "nobody"}`;
    }
    nodes.forEach((node, i) => {
      node.addEventListener("pointerenter", () => look(i));
      node.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") look(null); });
      node.addEventListener("click", (event) => { event.stopPropagation(); look(i); });
    });
    svg.addEventListener("click", () => look(null));
  }

  function draw(element) {
    if (element.classList.contains("heat")) drawHeat(element);
    else if (element.classList.contains("plot")) drawPlot(element, figures[element.dataset.figure]);
    else if (!drawn.has(element)) drawGraph(element);
    drawn.add(element);
  }

  const visible = () => [...document.querySelectorAll("[data-figure]")].filter((e) => !e.closest("[hidden]"));

  // One figure a frame: the page can be read and scrolled while the rest is drawn.
  function drawMissing() {
    const next = visible().find((element) => !drawn.has(element));
    if (!next) { document.body.dataset.drawn = "yes"; return; }
    draw(next);
    requestAnimationFrame(drawMissing);
  }

  const redraw = (fresh) => visible().filter((element) => drawn.has(element)).forEach((element) => {
    if (fresh && !element.classList.contains("graph")) Plotly.purge(element); // colour bars cannot be turned in place
    draw(element);
  });
  dark.addEventListener("change", () => redraw(false));
  narrow.addEventListener("change", () => redraw(true));
  const chooser = document.getElementById("run");
  if (chooser) {
    chooser.addEventListener("change", () => {
      document.body.dataset.drawn = "no";
      document.querySelectorAll(".run").forEach((run) => { run.hidden = run.dataset.run !== chooser.value; });
      redraw(true); // the width or the colours may have changed while it was hidden
      drawMissing();
    });
  }
  drawMissing();
})();
