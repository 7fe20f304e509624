// OpenAI's client for Node: chat completions and Responses.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import * as world from "./world.mjs";

const options = { maxRetries: 0, timeout: 60_000 };
const client = new OpenAI({ baseURL: `${world.url}/v1`, apiKey: world.key, ...options });
const scripted = new OpenAI({ baseURL: `${world.scripted.url}/v1`, apiKey: "none", ...options });
const tool = { type: "function", function: { name: "get_weather", parameters: world.weatherSchema, strict: true } };
const flatTool = { type: "function", name: "get_weather", parameters: world.weatherSchema, strict: true };
const looseTool = { type: "function", function: { name: "get_weather", parameters: world.weatherSchema } };

const ask = (content) => ({ model: world.model, messages: [{ role: "user", content }], temperature: 0, max_tokens: 200 });

test("plain", async () => {
  const answer = await client.chat.completions.create(ask(world.CAPITAL));
  assert.equal(answer.choices[0].message.content, world.PARIS);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("plain: parts, a developer, and fields without effect", async () => {
  const answer = await client.chat.completions.create({
    model: world.model,
    messages: [
      { role: "developer", content: [{ type: "text", text: "Be brief." }] },
      { role: "user", content: [{ type: "text", text: world.CAPITAL }], name: "alice" },
    ],
    max_completion_tokens: 20,
    metadata: { task: "geography" },
    n: 1,
    parallel_tool_calls: true,
    reasoning_effort: "low",
    seed: 1,
    service_tier: "auto",
    store: null,
    user: "alice",
  });
  assert.equal(answer.choices.length, 1);
});

test("streaming", async () => {
  const stream = client.chat.completions.stream({ ...ask(world.CAPITAL), stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const answer = await stream.finalChatCompletion();
  assert.equal(text, world.PARIS);
  assert.equal(answer.choices[0].message.content, world.PARIS);
  assert.ok((await stream.totalUsage()).completion_tokens > 3);
});

test("forced tool", async () => {
  const tool_choice = { type: "function", function: { name: "get_weather" } };
  const answer = await client.chat.completions.parse({ ...ask(world.WEATHER), tools: [tool], tool_choice });
  world.Weather.parse(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
});

test("required tool: streamed", async () => {
  const stream = client.chat.completions.stream({ ...ask(world.WEATHER), tools: [tool], tool_choice: "required" });
  const [choice] = (await stream.finalChatCompletion()).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  world.Weather.parse(JSON.parse(choice.message.tool_calls[0].function.arguments));
});

test("required tool: among allowed ones", async () => {
  const other = { type: "function", function: { name: "get_time", parameters: { type: "object", properties: {} } } };
  const allowed_tools = { mode: "required", tools: [{ type: "function", function: { name: "get_weather" } }] };
  const tool_choice = { type: "allowed_tools", allowed_tools };
  const answer = await client.chat.completions.create({ ...ask("What time is it?"), tools: [other, looseTool], tool_choice });
  assert.equal(answer.choices[0].message.tool_calls[0].function.name, "get_weather");
});

test("tool round trip", async () => {
  const runner = scripted.chat.completions.runTools({
    model: world.scripted.model,
    messages: [{ role: "user", content: world.WEATHER }],
    tools: [{ type: "function", function: { ...looseTool.function, function: () => "Snow.", parse: JSON.parse } }],
  });
  assert.equal(await runner.finalContent(), world.SNOWS);
  assert.deepEqual(JSON.parse((await runner.finalFunctionToolCall()).arguments).city, "Oslo");
});

test("tool round trip: streamed", async () => {
  const runner = scripted.chat.completions.runTools({
    model: world.scripted.model,
    stream: true,
    messages: [{ role: "user", content: world.WEATHER }],
    tools: [{ type: "function", function: { ...looseTool.function, function: () => "Snow.", parse: JSON.parse } }],
  });
  assert.equal(await runner.finalContent(), world.SNOWS);
});

test("structured output", async () => {
  const response_format = zodResponseFormat(world.Weather, "weather");
  const answer = await client.chat.completions.parse({ ...ask(world.WEATHER), response_format });
  world.Weather.parse(answer.choices[0].message.parsed);
});

test("responses: plain", async () => {
  const answer = await client.responses.create({ model: world.model, input: world.CAPITAL, temperature: 0 });
  assert.equal(answer.output_text, world.PARIS);
});

test("responses: typed events", async () => {
  const stream = client.responses.stream({ model: world.model, input: world.CAPITAL, temperature: 0 });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const answer = await stream.finalResponse();
  assert.equal(text, world.PARIS);
  assert.equal(answer.output_text, world.PARIS);
});

test("responses: structured output", async () => {
  const text = { format: zodTextFormat(world.Weather, "weather") };
  const answer = await client.responses.parse({ model: world.model, input: world.WEATHER, max_output_tokens: 200, text });
  world.Weather.parse(answer.output_parsed);
});

test("responses: forced tool, streamed", async () => {
  const tool_choice = { type: "function", name: "get_weather" };
  const stream = client.responses.stream({ model: world.model, input: world.WEATHER, tools: [flatTool], tool_choice });
  const call = (await stream.finalResponse()).output.find((item) => item.type === "function_call");
  world.Weather.parse(JSON.parse(call.arguments));
});

test("responses: tool round trip", async () => {
  const tools = [{ ...flatTool, strict: null }];
  const input = [{ role: "user", content: world.WEATHER }];
  const first = await scripted.responses.create({ model: world.scripted.model, input, tools });
  const call = first.output.find((item) => item.type === "function_call");
  assert.equal(JSON.parse(call.arguments).city, "Oslo");
  input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: "Snow." });
  const second = await scripted.responses.create({ model: world.scripted.model, input, tools });
  assert.equal(second.output_text, world.SNOWS);
});

test("errors", async () => {
  const stranger = new OpenAI({ baseURL: `${world.url}/v1`, apiKey: "wrong", ...options });
  await assert.rejects(stranger.chat.completions.create(ask("Hi")), OpenAI.AuthenticationError);
  await assert.rejects(client.chat.completions.create({ ...ask("Hi"), model: "none" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create(ask(world.TOO_LONG)), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    return /maximum context length/.test(error.message);
  });
  await assert.rejects(client.responses.create({ model: "none", input: "Hi" }), OpenAI.NotFoundError);
});

test("abort", async () => {
  const stream = await client.chat.completions.create({ ...ask(world.LONG), max_tokens: 2000, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) break;
  }
  stream.controller.abort();
  await world.becomesIdle();
});
