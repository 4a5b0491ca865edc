"""Checks shared by the tests of the web pages."""

from __future__ import annotations

# Relative luminance and contrast as in WCAG 2. What is hidden or disabled does not count.
_CONTRAST = """
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = (color) => color.match(/[\\d.]+/g).map(Number);
const isOpaque = (color) => color.length < 4 || color[3] === 1;
const contrast = (one, other) => {
  const [a, b] = [luminance(one), luminance(other)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
};
const background = (node) => {
  for (; node; node = node.parentElement) {
    const color = parse(getComputedStyle(node).backgroundColor);
    if (isOpaque(color)) return color;
  }
  return [255, 255, 255];
};
"""

# The elements whose text or placeholder has a contrast of less than 4.5; text in a canvas does not count.
LOW_CONTRAST = (
    _CONTRAST
    + """
return [...document.querySelectorAll("body *")].filter((node) => {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.nodeValue.trim());
  if (!(own || node.placeholder) || !node.checkVisibility()) return false;
  const color = (part) => parse(getComputedStyle(node, part).color);
  return contrast(color(node.placeholder ? "::placeholder" : null), background(node)) < 4.5;
}).map((node) => node.outerHTML);
"""
)

# The controls whose boundary or focus ring has a contrast of less than 3 (WCAG 1.4.11). A button may have no boundary
# but its label, and browsers draw checkboxes.
LOW_CONTROL_CONTRAST = (
    _CONTRAST
    + """
const focused = document.activeElement;
const isLow = (node) => {
  const shown = node.type === "radio" ? node.nextElementSibling : node; // the radio buttons are invisible
  if (!shown.checkVisibility() || node.disabled) return false;
  const around = background(shown.parentElement);
  const { borderTopStyle, borderTopColor, backgroundColor } = getComputedStyle(shown);
  const boundary = borderTopStyle === "none" ? [backgroundColor] : [borderTopColor, backgroundColor];
  const colors = boundary.map(parse).filter(isOpaque);
  if (node.matches("button, select, textarea, input:not([type=checkbox], [type=radio])") && colors.length)
    if (Math.max(...colors.map((color) => contrast(color, around))) < 3) return true;
  node.focus({ focusVisible: true });
  const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(shown);
  return outlineStyle !== "solid" || parseFloat(outlineWidth) < 2 || contrast(parse(outlineColor), around) < 3;
};
const low = [...document.querySelectorAll("button, input, select, textarea, a, summary, [tabindex]")].filter(isLow);
focused.focus();
return low.map((node) => node.outerHTML);
"""
)

# The highest contrast of a pixel of the labels of each axis: strokes are thin, so that most pixels are blended.
AXIS_CONTRAST = (
    _CONTRAST
    + """
return [...document.querySelectorAll("canvas")].flatMap((canvas) => {
  const around = background(canvas), context = canvas.getContext("2d");
  const highest = (...area) => {
    const { data } = context.getImageData(...area), found = [];
    for (let i = 0; i < data.length; i += 4) {
      const opacity = data[i + 3] / 255;
      const color = around.slice(0, 3).map((value, part) => value + opacity * (data[i + part] - value));
      found.push(contrast(color, around));
    }
    return Math.max(...found);
  };
  const { width, height } = canvas;
  return [highest(0, 0, 60, height), highest(0, height - 30, width, 30)];
});
"""
)
