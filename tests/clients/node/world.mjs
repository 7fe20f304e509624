// What the checks of all Node clients share: the servers under test, and the questions.

import assert from "node:assert/strict";
import { z } from "zod";

export const url = process.env.KVLOOM_URL;
export const key = process.env.KVLOOM_API_KEY;
export const model = "smollm2-135m-instruct";
export const scripted = { url: process.env.KVLOOM_SCRIPTED_URL, model: "tiny" };

export const CAPITAL = "What is the capital of France? Answer in one short sentence.";
export const PARIS = "The capital of France is Paris.";
export const LONG = "Count to a thousand, slowly.";
export const TOO_LONG = "word ".repeat(20_000);
export const WEATHER = "What is the weather in Oslo?";
export const SNOWS = "It snows in Oslo.";

export const Weather = z.object({ city: z.string().max(20), unit: z.enum(["C", "F"]) });
export const weatherSchema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};

// An aborted request must leave the edge: no other request runs while a client is checked.
export async function becomesIdle() {
  for (const deadline = Date.now() + 10_000; Date.now() < deadline; ) {
    const page = await fetch(`${url}/metrics`, { headers: { Authorization: `Bearer ${key}` } });
    if (/^kvloom_edge_running_requests 0(\.0)?$/m.test(await page.text())) return;
  }
  assert.fail("the aborted request still runs after 10 s");
}
