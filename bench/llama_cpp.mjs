// Times llama.cpp for bench/decode_cpu.py: `node llama_cpp.mjs FOLDER`, where FOLDER is its installation. Each line of
// standard input is {model, threads, prompt, count}; each line of output {prompt_seconds, seconds}: until the first new
// token, and for the `count - 1` after it.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const modulePath = pathToFileURL(`${process.argv[2]}/node_modules/node-llama-cpp/dist/index.js`);
const {getLlama, LlamaLogLevel} = await import(modulePath);
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.error
});
const contexts = new Map();

async function getContext(modelPath, threads) {
    const key = `${modelPath} ${threads}`;
    if (!contexts.has(key)) {
        const model = await llama.loadModel({modelPath, gpuLayers: 0});
        contexts.set(key, await model.createContext({contextSize: 1024, batchSize: 512, threads, flashAttention: true}));
    }
    return contexts.get(key);
}

for await (const line of createInterface({input: process.stdin})) {
    const {model, threads, prompt, count} = JSON.parse(line);
    const sequence = (await getContext(model, threads)).getSequence();
    const start = performance.now();
    let first = null, tokens = 0;
    for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        first ??= performance.now();
        tokens += 1;
        if (tokens === count) break;
    }
    const end = performance.now();
    sequence.dispose();
    process.stdout.write(JSON.stringify({prompt_seconds: (first - start) / 1000, seconds: (end - first) / 1000}) + "\n");
}
