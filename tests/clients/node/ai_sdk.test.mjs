// The Vercel AI SDK through its provider for servers that speak OpenAI's API.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, Output, generateText, isStepCount, jsonSchema, streamText, tool } from 'ai';
import { z } from 'zod';
import { CITY, DESCRIPTION, FRANCE, WEATHER, model, untilIdle, url } from './common.mjs';

const provider = createOpenAICompatible({
  name: 'glm53', baseURL: `${url}/v1`, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true,
});
const asked = { model: provider(model), temperature: 0, maxRetries: 0 };
// The small model knows tools in these words; the schema that zod writes has more of them.
const getWeather = (cities) => tool({
  description: DESCRIPTION,
  inputSchema: jsonSchema(CITY),
  execute: async ({ city }) => {
    cities.push(city);
    return { temperature: 21 };
  },
});

test('generateText and streamText say the same, reasoning apart', async () => {
  const whole = await generateText({ ...asked, prompt: FRANCE });
  assert.match(whole.text, /Paris/);
  assert.ok(whole.reasoningText.length > 0);
  assert.doesNotMatch(whole.text, /think>/);
  const streamed = streamText({ ...asked, prompt: FRANCE });
  const parts = { text: '', reasoning: '' };
  for await (const part of streamed.fullStream) {
    if (part.type === 'error') throw part.error;
    if (part.type === 'text-delta') parts.text += part.text;
    if (part.type === 'reasoning-delta') parts.reasoning += part.text;
  }
  assert.deepEqual(parts, { text: whole.text, reasoning: whole.reasoningText });
  const usage = await streamed.usage;
  assert.equal(usage.outputTokens, whole.usage.outputTokens);
  assert.ok(usage.inputTokens > 0);
  assert.equal(await streamed.finishReason, 'stop');
});

test('a tool is called, run, and its result answered, streamed and whole', async () => {
  for (const run of [generateText, streamText]) {
    const cities = [];
    const made = run({ ...asked, prompt: WEATHER, tools: { get_weather: getWeather(cities) }, stopWhen: isStepCount(3) });
    const result = await made;
    if (result.consumeStream) await result.consumeStream();
    assert.match(await result.text, /21/);
    assert.deepEqual(cities, ['Paris']);
    assert.equal((await result.steps).length, 2);
  }
});

test('an object of a schema', async () => {
  const schema = z.object({ ok: z.boolean(), of: z.enum(['a', 'b']) });
  const made = await generateText({ ...asked, prompt: FRANCE, output: Output.object({ schema }) });
  assert.equal(typeof made.output.ok, 'boolean');
  assert.ok(['a', 'b'].includes(made.output.of));
});

test('a required tool is called', async () => {
  const cities = [];
  const made = await generateText({ ...asked, prompt: FRANCE, tools: { get_weather: getWeather(cities) }, toolChoice: 'required' });
  assert.equal(made.finishReason, 'tool-calls');
  assert.equal(cities.length, 1);
});

test('errors carry the status and the message', async () => {
  await assert.rejects(generateText({ ...asked, model: provider('other'), prompt: FRANCE }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /other/);
    return true;
  });
});

test('an abort frees its place', async () => {
  const leaving = new AbortController();
  const options = { ...asked, prompt: FRANCE, maxOutputTokens: 2000, abortSignal: leaving.signal, onError: () => {} };
  const streamed = streamText({ ...options, providerOptions: { glm53: { ignore_eos: true } } });
  let seen = 0;
  for await (const part of streamed.fullStream) {
    seen += part.type === 'reasoning-delta' || part.type === 'text-delta' ? 1 : 0;
    if (seen === 3) leaving.abort();
  }
  assert.ok(seen >= 3);
  await untilIdle();
});
