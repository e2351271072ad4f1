// The words on a page whose contrast with what is behind them is below 4.5:1, and where they stand.
() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(colour[i] / 255), 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255, 255];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => (c * top[3] + below[i] * (255 - top[3])) / 255);
  const hasWords = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const signs = ".sign, .legend i, option, [aria-hidden=true], .md-skip, .headerlink";
  const found = [];
  for (const e of document.querySelectorAll("main *, article *, footer")) {
    if (!e.checkVisibility({ opacityProperty: true }) || !hasWords(e) || e.closest(signs)) continue;
    const style = getComputedStyle(e), node = e.closest(".node");
    const paper = node ? rgb(getComputedStyle(node.querySelector("circle")).fill) : behind(e);
    const ink = over(rgb(e instanceof SVGElement ? style.fill : style.color), paper);
    const [high, low] = [light(ink), light(paper)].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) found.push(e.outerHTML.slice(0, 120));
  }
  return found;
}
