"""Checks shared by the tests of the web pages."""

from __future__ import annotations

# Relative luminance and contrast as in WCAG 2; text that is hidden, disabled or inside a canvas does not count.
LOW_CONTRAST = """
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = (color) => color.match(/[\\d.]+/g).map(Number);
const background = (node) => {
  for (; node; node = node.parentElement) {
    const color = parse(getComputedStyle(node).backgroundColor);
    if (color.length < 4 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll("body *")].filter((node) => {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.nodeValue.trim());
  if (!own || !node.checkVisibility()) return false;
  const [a, b] = [luminance(parse(getComputedStyle(node).color)), luminance(background(node))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < 4.5;
}).map((node) => node.outerHTML);
"""
