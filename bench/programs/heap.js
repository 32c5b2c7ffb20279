// heap.js SOCKET MEBIBYTES: as heap.py; an answer for each line.
const [path, size] = [process.argv[2], Number(process.argv[3])];
const entries = size * 2500;
const heap = new Map();
for (let n = 0; n < entries; n++) {
  heap.set(n, Array.from({ length: 16 }, () => n));
}
function work(seed, lookups) {
  let sum = 0;
  for (let i = 0; i < lookups; i++) {
    seed = (seed * 16807) % 2147483647;
    sum += 48 + (heap.get(seed % entries)[11] % 10);
  }
  return sum;
}
require("net")
  .createServer((client) => {
    client.on("data", (line) => client.write(`${work(...String(line).split(" ").map(Number))}\n`));
    client.on("error", () => {});
  })
  .listen(path);
