// Runs GGUF files with llama.cpp: `node llama_cpp.mjs FOLDER < requests.json`, where FOLDER is its installation.
// A request is {model, texts, prompt, chats, count}; its answer is {ids, tokens, text, chats}: the ids of each text, and
// `count` tokens that continue the prompt greedily. Without a prompt, texts are only tokenized. Each of `chats` is a user
// message, rendered with the file's own chat template; its answer is {ids, tokens}, with the token that ended it, if any.
import {json} from "node:stream/consumers";
import {pathToFileURL} from "node:url";

const modulePath = pathToFileURL(`${process.argv[2]}/node_modules/node-llama-cpp/dist/index.js`);
const {getLlama, JinjaTemplateChatWrapper, LlamaLogLevel} = await import(modulePath);
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.error
});

async function generate(model, context, ids, count, stopAtEnd) {
    const tokens = [], sequence = context.getSequence();
    for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        tokens.push(token);
        if (tokens.length === count || (stopAtEnd && model.isEogToken(token))) break;
    }
    sequence.dispose();
    return tokens;
}

const answers = [];
for (const {model: modelPath, texts = [], prompt, chats = [], count} of await json(process.stdin)) {
    const model = await llama.loadModel({modelPath, gpuLayers: 0});
    const answer = {ids: texts.map((text) => model.tokenize(text)), tokens: [], chats: []};
    if (prompt != null || chats.length) {
        const context = await model.createContext({contextSize: model.trainContextSize, threads: 1});
        const start = model.tokens.shouldPrependBosToken ? [model.tokens.bos] : [];
        if (prompt != null) {
            answer.tokens = await generate(model, context, [...start, ...model.tokenize(prompt)], count, false);
        }
        const template = model.fileInfo.metadata.tokenizer.chat_template;
        const wrapper = chats.length && new JinjaTemplateChatWrapper({template, tokenizer: model.tokenizer});
        for (const text of chats) {
            const chatHistory = [{type: "user", text}, {type: "model", response: []}];
            const ids = wrapper.generateContextState({chatHistory}).contextText.tokenize(model.tokenizer);
            answer.chats.push({ids, tokens: await generate(model, context, ids, count, true)});
        }
        await context.dispose();
    }
    answer.text = model.detokenize(answer.tokens, true);
    answers.push(answer);
    await model.dispose();
}
process.stdout.write(JSON.stringify(answers), () => process.exit(0));
