// The page: drawings with a kind each, a button that trains on them, the curve of the loss.
import { TrainingStep } from "./step.js";

const SIDE = 12, KINDS = ["first", "second", "third"], BATCH = 8;
const byId = (id) => document.getElementById(id);
const drawn = new Float32Array(SIDE * SIDE);
const examples = [];
const losses = [];

function paint() {
  const context = byId("drawing").getContext("2d");
  const size = context.canvas.width / SIDE;
  for (let i = 0; i < drawn.length; i++) {
    const shade = Math.round(255 * (1 - drawn[i]));
    context.fillStyle = `rgb(${shade} ${shade} ${shade})`;
    context.fillRect((i % SIDE) * size, Math.floor(i / SIDE) * size, size, size);
  }
}

function draw(event) {
  if (!(event.buttons & 1)) return;
  const area = byId("drawing").getBoundingClientRect();
  const x = Math.floor(((event.clientX - area.left) / area.width) * SIDE);
  const y = Math.floor(((event.clientY - area.top) / area.height) * SIDE);
  if (x >= 0 && x < SIDE && y >= 0 && y < SIDE) drawn[y * SIDE + x] = 1;
  paint();
}

function clear() {
  drawn.fill(0);
  paint();
}

function keep(kind) {
  examples.push({ numbers: drawn.slice(), kind });
  const counts = KINDS.map((name, i) => `${name} ${examples.filter((one) => one.kind === i).length}`);
  byId("examples").textContent = `Drawings: ${counts.join(", ")}.`;
  byId("train").disabled = false;
  clear();
}

// The drawings of the next batch, in rotation over all drawings.
function batch(begin) {
  const numbers = new Float32Array(BATCH * SIDE * SIDE);
  const kinds = new BigInt64Array(BATCH);
  for (let i = 0; i < BATCH; i++) {
    const one = examples[(begin + i) % examples.length];
    numbers.set(one.numbers, i * SIDE * SIDE);
    kinds[i] = BigInt(one.kind);
  }
  return { inputs: ["float32", numbers, [BATCH, SIDE * SIDE]], targets: ["int64", kinds, [BATCH]] };
}

function curve() {
  const context = byId("curve").getContext("2d");
  const { width, height } = context.canvas;
  const most = Math.max(...losses, 1e-9);
  context.clearRect(0, 0, width, height);
  context.beginPath();
  losses.forEach((loss, i) => {
    const x = (i / Math.max(losses.length - 1, 1)) * (width - 4) + 2;
    context.lineTo(x, height - 2 - (loss / most) * (height - 4));
  });
  context.stroke();
}

async function train(step) {
  byId("train").disabled = true;
  for (let i = 0; i < 50; i++) {
    const { loss } = await step.train(batch(step.steps * BATCH));
    losses.push(loss[0]);
    curve();
    byId("status").textContent = `Step ${step.steps}: loss ${loss[0].toFixed(4)}`;
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  byId("train").disabled = false;
}

async function guess(step) {
  const numbers = new Float32Array(BATCH * SIDE * SIDE);
  numbers.set(drawn);
  const scores = await step.predict({ input: ["float32", numbers, [BATCH, SIDE * SIDE]] });
  const own = Array.from(scores.slice(0, KINDS.length));
  byId("status").textContent = `This looks like the ${KINDS[own.indexOf(Math.max(...own))]} kind.`;
}

const step = await TrainingStep.load("step");
KINDS.forEach((name, kind) => {
  const button = document.createElement("button");
  button.textContent = `Keep as the ${name} kind`;
  button.onclick = () => keep(kind);
  byId("kinds").append(button);
});
byId("drawing").onpointermove = byId("drawing").onpointerdown = draw;
byId("clear").onclick = clear;
byId("train").onclick = () => train(step);
byId("guess").onclick = () => guess(step);
byId("status").textContent = "Draw some of each kind, then train.";
clear();
