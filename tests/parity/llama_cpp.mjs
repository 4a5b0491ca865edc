// Runs GGUF files with llama.cpp: `node llama_cpp.mjs FOLDER < requests.json`, where FOLDER is its installation.
// A request is {model, texts, prompt, count}; its answer is {ids, tokens, text}: the ids of each text, and `count` tokens
// that continue the prompt greedily. Without a prompt, texts are only tokenized.
import {json} from "node:stream/consumers";
import {pathToFileURL} from "node:url";

const modulePath = pathToFileURL(`${process.argv[2]}/node_modules/node-llama-cpp/dist/index.js`);
const {getLlama, LlamaLogLevel} = await import(modulePath);
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.error
});
const answers = [];
for (const {model: modelPath, texts, prompt, count} of await json(process.stdin)) {
    const model = await llama.loadModel({modelPath, gpuLayers: 0});
    const answer = {ids: texts.map((text) => model.tokenize(text)), tokens: []};
    if (prompt != null) {
        const context = await model.createContext({contextSize: model.trainContextSize, threads: 1});
        const ids = model.tokenize(prompt);
        if (model.tokens.shouldPrependBosToken) ids.unshift(model.tokens.bos);
        for await (const token of context.getSequence().evaluate(ids, {temperature: 0, yieldEogToken: true})) {
            answer.tokens.push(token);
            if (answer.tokens.length === count) break;
        }
        await context.dispose();
    }
    answer.text = model.detokenize(answer.tokens, true);
    answers.push(answer);
    await model.dispose();
}
process.stdout.write(JSON.stringify(answers), () => process.exit(0));
