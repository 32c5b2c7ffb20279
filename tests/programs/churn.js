// Workers that answer each other, and a main thread that makes garbage; all of it is counted.
const { Worker, isMainThread, parentPort } = require('worker_threads');

if (isMainThread) {
  const next = [];
  let answers = 0;
  for (let i = 0; i < 2; i++) {
    const worker = new Worker(__filename);
    next.push(1);
    worker.on('message', (value) => {
      answers++;
      if (value !== next[i] || answers !== next[0] + next[1] - 1) {
        console.log('wrong:', value, next, answers);
        process.exit(3);
      }
      next[i] = value + 1;
      worker.postMessage(value);
    });
    worker.postMessage(0);
  }
  let garbage = [];
  setInterval(() => {
    for (let i = 0; i < 2000; i++) garbage.push({ i, text: 'x'.repeat(i % 100) });
    if (JSON.parse(JSON.stringify(garbage.slice(-100))).length !== 100) process.exit(4);
    if (garbage.length > 100000) garbage = [];
  }, 5);
  setInterval(() => console.log('counted', answers), 20);
} else {
  parentPort.on('message', (value) => {
    const garbage = [];
    for (let i = 0; i < 1000; i++) garbage.push([i, value]);
    parentPort.postMessage(garbage[999][1] + 1);
  });
}
