// A training step that torch2ort exported, on onnxruntime-web; each step's state is an input of the next.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";

ort.env.wasm.wasmPaths = new URL("./node_modules/onnxruntime-web/dist/", import.meta.url).href;
// More threads need headers that a plain static server does not send.
ort.env.wasm.numThreads = 1;

const KINDS = {
  F32: ["float32", Float32Array],
  F64: ["float64", Float64Array],
  I64: ["int64", BigInt64Array],
  I32: ["int32", Int32Array],
  BOOL: ["bool", Uint8Array],
};

async function fetched(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status} ${answer.statusText}; run make_step.py first`);
  return answer;
}

// Tensors of a safetensors file by their names: a length, a header in JSON, and the numbers behind it.
function tensorsOf(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  delete header.__metadata__;
  const found = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
    const [type, Kind] = KINDS[dtype];
    found[name] = new ort.Tensor(type, new Kind(buffer.slice(8 + length + begin, 8 + length + end)), shape);
  }
  return found;
}

export class TrainingStep {
  // `folder`: the URL of the folder that TrainingArtifacts.save wrote.
  static async load(folder) {
    const [description, checkpoint] = await Promise.all([
      fetched(`${folder}/training.json`).then((answer) => answer.json()),
      fetched(`${folder}/checkpoint.safetensors`).then((answer) => answer.arrayBuffer()),
    ]);
    const step = new TrainingStep();
    step.description = description;
    step.rate = description.learning_rate;
    step.steps = 0;
    step.seed = 0;
    const tensors = tensorsOf(checkpoint);
    step.folder = folder;
    step.session = await ort.InferenceSession.create(`${folder}/train_step.onnx`);
    const taken = new Set(step.session.inputNames);
    step.state = Object.fromEntries(Object.entries(tensors).filter(([name]) => taken.has(name)));
    step.first = step.state;
    return step;
  }

  // Run one step; `batch` has a [type, numbers, shape] for each input. Returns loss and metrics.
  async train(batch) {
    const feeds = { ...this.state, learning_rate: new ort.Tensor("float32", [this.rate], []) };
    if (this.description.seeded) {
      feeds.seed = new ort.Tensor("int64", [BigInt(this.seed), BigInt(this.steps)], [2]);
    }
    for (const [name, [type, numbers, shape]] of Object.entries(batch)) {
      feeds[name] = new ort.Tensor(type, numbers, shape);
    }
    const results = await this.session.run(feeds);
    const state = { ...this.state };
    for (const [output, input] of Object.entries(this.description.feeds["train_step.onnx"])) {
      if (input in state) state[input] = results[output];
    }
    this.state = state;
    this.steps += 1;
    return Object.fromEntries(this.description.results.map((name) => [name, results[name].data]));
  }

  // Return the model's outputs for some inputs, with the current parameters.
  async predict(inputs) {
    this.model ??= await ort.InferenceSession.create(`${this.folder}/inference_model.onnx`);
    const feeds = { ...inputs };
    for (const [name, [type, numbers, shape]] of Object.entries(inputs)) {
      feeds[name] = new ort.Tensor(type, numbers, shape);
    }
    for (const name of this.description.evaluated["inference_model.onnx"]) feeds[name] = this.state[name];
    const results = await this.model.run(feeds);
    return results[this.model.outputNames[0]].data;
  }

  reset() {
    this.state = this.first;
    this.steps = 0;
  }
}
