// The contrast of every text that is seen with what is behind it, as WCAG 2 counts it.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colours = new Map();
  const rgba = (text) => {
    if (!colours.has(text)) colours.set(text, read(text));
    return colours.get(text);
  };
  const read = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) =>
    [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const luminance = (colour) => {
    const [r, g, b] = colour.map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // What is behind an element, and how much of what is in it is seen.
  const known = new Map([[null, { back: [255, 255, 255, 1], opacity: 1 }]]);
  const behind = (element) => {
    if (!known.has(element)) {
      const { back, opacity } = behind(element.parentElement);
      const square = element.matches(".chips g, .row .span") && element.querySelector("rect");
      const style = getComputedStyle(element);
      const layer = rgba(square ? getComputedStyle(square).fill : style.backgroundColor);
      known.set(element, { back: over(layer, back), opacity: opacity * Number(style.opacity) });
    }
    return known.get(element);
  };
  const too_faint = [];
  let looked_at = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility() || element.closest(".unseen, script, option, title, desc"))
      continue;
    looked_at += 1;
    const style = getComputedStyle(element);
    const { back, opacity } = behind(element);
    let colour = rgba(element.closest("svg") ? style.fill : style.color);
    colour = over([...colour.slice(0, 3), colour[3] * opacity], back);
    const [low, high] = [luminance(colour), luminance(back)].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) too_faint.push(`${contrast.toFixed(2)}: ${text.slice(0, 40)}`);
  }
  return { looked_at, too_faint };
})()
