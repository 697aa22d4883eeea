"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const plot = document.getElementById("plot"), cursor = document.getElementById("cursor"), where = document.getElementById("where");
const cells = Array.from(document.querySelectorAll("[data-row]"));
const last = data.events.length - 1;
const MIB = 1048576;
let at = data.peak;

// whole MiB that add up to the whole MiB of their sum: the largest remainders are rounded up
function shown(amounts) {
  const floors = amounts.map(amount => Math.floor(amount / MIB));
  const sum = amounts.reduce((a, b) => a + b, 0);
  const order = amounts.map((_, row) => row).sort((a, b) => amounts[b] % MIB - amounts[a] % MIB);
  const missing = Math.ceil(sum / MIB) - floors.reduce((a, b) => a + b, 0);
  for (const row of order.slice(0, missing)) floors[row] += 1;
  return [...floors, Math.ceil(sum / MIB)];
}

function show(moment) {
  at = Math.max(0, Math.min(last, moment));
  cursor.style.left = 50 * (data.positions[at] + data.positions[at + 1]) + "%";
  const amounts = shown(data.rows.map(row => row[at]));
  cells.forEach((cell, row) => { cell.textContent = amounts[row].toLocaleString("en"); });
  const text = data.phases[data.phase_of[at]] + ", event " + (data.events[at] + 1).toLocaleString("en") + (at === data.peak ? ", the peak" : "");
  where.textContent = text;
  plot.setAttribute("aria-valuenow", at);
  plot.setAttribute("aria-valuetext", text + ": " + cells.map(cell => cell.dataset.name + " " + cell.textContent + " MiB").join(", "));
}

function under(event) {
  const box = plot.getBoundingClientRect(), place = (event.clientX - box.left) / box.width;
  let low = 0, high = last;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (data.positions[middle] <= place) low = middle; else high = middle - 1;
  }
  return low;
}

plot.addEventListener("pointermove", event => show(under(event)));
plot.addEventListener("pointerdown", event => show(under(event)));
plot.addEventListener("keydown", event => {
  const steps = {ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25, Home: -last, End: last};
  if (event.key in steps) { show(at + steps[event.key]); event.preventDefault(); }
});
show(at);
