// Anthropic's client for Node: the Messages API.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import * as world from "./world.mjs";

const options = { maxRetries: 0, timeout: 60_000 };
const client = new Anthropic({ baseURL: world.url, apiKey: world.key, ...options });
const scripted = new Anthropic({ baseURL: world.scripted.url, apiKey: "none", ...options });
const tool = { name: "get_weather", description: "The weather in a city.", input_schema: world.weatherSchema };

const ask = (content) => ({ model: world.model, max_tokens: 200, messages: [{ role: "user", content }] });

test("plain", async () => {
  const answer = await client.messages.create({ ...ask([{ type: "text", text: world.CAPITAL }]), temperature: 0 });
  assert.equal(answer.content[0].text, world.PARIS);
  assert.equal(answer.stop_reason, "end_turn");
});

test("streaming", async () => {
  let text = "";
  const stream = client.messages.stream({ ...ask(world.CAPITAL), temperature: 0 }).on("text", (delta) => (text += delta));
  const answer = await stream.finalMessage();
  assert.equal(text, world.PARIS);
  assert.ok(answer.usage.output_tokens > 3);
});

test("forced tool", async () => {
  const tool_choice = { type: "tool", name: "get_weather" };
  const answer = await client.messages.create({ ...ask(world.WEATHER), tools: [tool], tool_choice });
  world.Weather.parse(answer.content.find((block) => block.type === "tool_use").input);
});

test("required tool: streamed", async () => {
  const stream = client.messages.stream({ ...ask(world.WEATHER), tools: [tool], tool_choice: { type: "any" } });
  const answer = await stream.finalMessage();
  assert.equal(answer.stop_reason, "tool_use");
  world.Weather.parse(answer.content.find((block) => block.type === "tool_use").input);
});

test("tool round trip", async () => {
  const runnable = betaZodTool({ name: "get_weather", description: "", inputSchema: world.Weather.partial(), run: () => "Snow." });
  const runner = scripted.beta.messages.toolRunner({ ...ask(world.WEATHER), model: world.scripted.model, tools: [runnable] });
  const answer = await runner;
  assert.equal(answer.content.find((block) => block.type === "text").text, world.SNOWS);
});

test("structured output", async () => {
  const output_config = { format: zodOutputFormat(world.Weather) };
  const answer = await client.messages.parse({ ...ask(world.WEATHER), output_config });
  world.Weather.parse(answer.parsed_output);
});

test("errors", async () => {
  const stranger = new Anthropic({ baseURL: world.url, apiKey: "wrong", ...options });
  await assert.rejects(stranger.messages.create(ask("Hi")), Anthropic.AuthenticationError);
  await assert.rejects(client.messages.create({ ...ask("Hi"), model: "none" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create(ask(world.TOO_LONG)), (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    return /too long|maximum context length/.test(error.message);
  });
});

test("abort", async () => {
  const stream = client.messages.stream({ ...ask(world.LONG), max_tokens: 2000 });
  for await (const event of stream) {
    if (event.type === "content_block_delta") break;
  }
  stream.abort();
  await world.becomesIdle();
});
