// The Vercel AI SDK, with its providers for OpenAI's, OpenAI-compatible and Anthropic's APIs.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import * as world from "./world.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

const compatible = { name: "kvloom", includeUsage: true, supportsStructuredOutputs: true };
const providers = {
  "openai-compatible": ({ url }, apiKey) => createOpenAICompatible({ ...compatible, baseURL: `${url}/v1`, apiKey }),
  "openai chat": ({ url }, apiKey) => createOpenAI({ baseURL: `${url}/v1`, apiKey }).chat,
  responses: ({ url }, apiKey) => createOpenAI({ baseURL: `${url}/v1`, apiKey }),
  anthropic: ({ url }, apiKey) => createAnthropic({ baseURL: `${url}/v1`, apiKey }),
};
// Otherwise the provider sends references to earlier items, which no server without state can follow.
const providerOptions = { openai: { store: false } };
const weather = (execute) => tool({ description: "The weather in a city.", inputSchema: world.Weather, execute });

for (const [name, provider] of Object.entries(providers)) {
  const real = { model: provider(world, world.key)(world.model), maxRetries: 0, maxOutputTokens: 200, temperature: 0 };
  const scripted = { model: provider(world.scripted, "none")(world.scripted.model), maxRetries: 0, providerOptions };
  const title = (check) => (name === "responses" ? `responses: ${check}` : `${check}: ${name}`);

  test(title("plain"), async () => {
    const { text, finishReason, usage } = await generateText({ ...real, prompt: world.CAPITAL });
    assert.equal(text, world.PARIS);
    assert.equal(finishReason, "stop");
    assert.ok(usage.outputTokens > 3);
  });

  test(title("streaming"), async () => {
    const { textStream, usage } = streamText({ ...real, prompt: world.CAPITAL });
    let text = "";
    for await (const piece of textStream) text += piece;
    assert.equal(text, world.PARIS);
    assert.ok((await usage).outputTokens > 3);
  });

  test(title("forced tool"), async () => {
    const toolChoice = { type: "tool", toolName: "get_weather" };
    const { toolCalls } = await generateText({ ...real, prompt: "Oslo?", tools: { get_weather: weather() }, toolChoice });
    world.Weather.parse(toolCalls[0].input);
  });

  test(title("required tool"), async () => {
    const tools = { get_weather: weather() };
    const { toolCalls } = streamText({ ...real, prompt: world.WEATHER, tools, toolChoice: "required" });
    world.Weather.parse((await toolCalls)[0].input);
  });

  test(title("tool round trip"), async () => {
    const tools = { get_weather: weather(() => "Snow.") };
    const { text, steps } = await generateText({ ...scripted, prompt: world.WEATHER, tools, stopWhen: stepCountIs(3) });
    assert.equal(text, world.SNOWS);
    assert.equal(steps[0].toolCalls[0].input.city, "Oslo");
    const showsReasoning = ["openai-compatible", "anthropic"].includes(name);
    if (showsReasoning) assert.equal(steps[0].reasoningText, "I have to look.");
  });

  test(title("structured output"), async () => {
    const { output } = await generateText({ ...real, prompt: world.WEATHER, output: Output.object({ schema: world.Weather }) });
    world.Weather.parse(output);
  });

  test(title("errors"), async () => {
    const failsWith = (status, words, more) =>
      assert.rejects(generateText({ ...real, prompt: "Hi", ...more }), (error) => {
        assert.ok(APICallError.isInstance(error), String(error));
        assert.equal(error.statusCode, status);
        return words.test(error.message);
      });
    await failsWith(401, /key/, { model: provider(world, "wrong")(world.model) });
    await failsWith(404, /none/, { model: provider(world, world.key)("none") });
    await failsWith(400, /maximum context length|prompt is too long/, { prompt: world.TOO_LONG });
  });

  test(title("abort"), async () => {
    const abort = new AbortController();
    const stream = streamText({ ...real, maxOutputTokens: 2000, prompt: world.LONG, abortSignal: abort.signal });
    for await (const piece of stream.textStream) {
      if (piece) break;
    }
    abort.abort();
    await world.becomesIdle();
  });
}
