// Round numbers for axes, and where they come to lie.

export function linear(from, to, left, right) {
  return (value) => left + ((value - from) / (to - from || 1)) * (right - left);
}

// Ticks in MiB: whole powers of two times 1, 2 or so many MiB, since memory is counted that way.
export function memoryTicks(from, to, most) {
  let step = 1;
  while ((to - from) / step > most) step *= 2;
  const ticks = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) ticks.push(tick);
  return ticks;
}
