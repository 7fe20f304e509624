// Charts of the last hour, by uPlot, from the samples that routers keep.
"use strict";

const MAX_SAMPLES = 720;  // of a router: an hour

const samples = [];
let ttftBounds = [];
const charts = [];

const CHARTS = [
  {title: "Tokens per second", unit: "/s", names: ["output", "prompt"], of: (s) => [s.output_tokens_per_second, s.prompt_tokens_per_second]},
  {title: "Requests", unit: "", names: ["in engines", "waiting"], of: (s) => [s.num_running, s.num_waiting + s.num_queued]},
  {title: "KV in use, prompt cached", unit: " %", names: ["KV in use", "cached"], of: (s) => [100 * s.kv_usage, 100 * s.hit_rate], top: 100},
  {title: "Time to first token", unit: " ms", names: ["p50", "p99"], of: (s) => [quantile(s.ttft_counts, 0.5), quantile(s.ttft_counts, 0.99)]},
];

// In milliseconds, from counts by bucket; null without any.
function quantile(counts, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let rest = share * total;
  for (const [number, count] of counts.entries()) {
    if (rest <= count && count) {
      const low = number ? ttftBounds[number - 1] : 0;
      const high = ttftBounds[number] ?? low;
      return 1000 * (low + (high - low) * rest / count);
    }
    rest -= count;
  }
  return 1000 * ttftBounds.at(-1);
}

function addSamples(more, bounds) {
  ttftBounds = bounds;
  const last = samples.at(-1)?.at_seconds ?? 0;
  samples.push(...more.filter((one) => one.at_seconds > last));
  samples.splice(0, samples.length - MAX_SAMPLES);
  if (more.length || !charts.length) drawCharts();
}

function drawCharts() {
  if (!charts.length) makeCharts();
  const times = samples.map((one) => one.at_seconds);
  for (const chart of charts) {
    const rows = samples.map(chart.about.of);
    chart.plot.setData([times, rows.map((row) => row[0]), rows.map((row) => row[1])]);
    const now = rows.at(-1) ?? [];
    const texts = chart.about.names.map((name, number) => `${name} ${shown(now[number])}${now[number] == null ? "" : chart.about.unit}`);
    chart.legend.replaceChildren(element("i", {class: "one"}), `${texts[0]}  `, element("i", {class: "two"}), texts[1]);
    chart.plot.root.setAttribute("aria-label", `${chart.about.title}, over the last hour; now: ${texts.join(", ")}`);
  }
}

function makeCharts() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = {stroke: color("--soft"), grid: {stroke: color("--line"), width: 1}, ticks: {show: false}};
  for (const about of CHARTS) {
    const legend = element("p");
    const place = element("figure", {class: "chart"}, element("figcaption", {}, about.title), legend);
    document.getElementById("charts").append(place);
    const line = (number) => ({stroke: color(`--series-${number}`), width: 2, points: {show: false}, spanGaps: true});
    const plot = new uPlot({
      width: 200, height: 150, legend: {show: false}, cursor: {show: false},
      scales: {y: {range: (_, low, high) => [0, about.top ?? Math.max(high ?? 0, 1)]}},
      axes: [{...axis, size: 28, values: (_, times) => times.map(clock)}, {...axis, size: 52}], series: [{}, line(1), line(2)],
    }, [[], [], []], place);
    plot.root.setAttribute("role", "img");
    charts.push({about, legend, plot, place});
  }
  fitCharts();
}

function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});
}

function fitCharts() {
  for (const {plot, place} of charts) {
    const width = place.clientWidth - 30;
    if (width > 0) plot.setSize({width, height: 150});
  }
}

addEventListener("resize", fitCharts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts.splice(0)) { chart.plot.destroy(); chart.place.remove(); }
  drawCharts();
});
