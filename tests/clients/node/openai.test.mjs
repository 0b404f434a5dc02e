// The official OpenAI client for Node.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI, { BadRequestError, NotFoundError } from 'openai';
import { CITY, DESCRIPTION, FRANCE, WEATHER, model, untilIdle, url } from './common.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, timeout: 60_000 });
const france = { model, temperature: 0, messages: [{ role: 'user', content: FRANCE }] };
const weather = { model, temperature: 0, messages: [{ role: 'user', content: WEATHER }] };
const tools = [{ type: 'function', function: { name: 'get_weather', description: DESCRIPTION, parameters: CITY } }];

test('models are listed', async () => {
  const names = [];
  for await (const entry of client.models.list()) names.push(entry.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test('a stream says what the whole answer says, and usage comes last', async () => {
  const whole = await client.chat.completions.create(france);
  const { message } = whole.choices[0];
  assert.match(message.content, /Paris/);
  assert.ok(message.reasoning_content.length > 0);
  const got = { content: '', reasoning: '', roles: 0, finish: [] };
  let usage;
  for await (const chunk of await client.chat.completions.create({ ...france, stream: true, stream_options: { include_usage: true } })) {
    assert.equal(usage, undefined, 'nothing follows the usage');
    if (chunk.choices.length === 0) {
      usage = chunk.usage;
      continue;
    }
    const [{ delta, finish_reason: finish }] = chunk.choices;
    got.content += delta.content ?? '';
    got.reasoning += delta.reasoning_content ?? '';
    got.roles += delta.role ? 1 : 0;
    if (finish) got.finish.push(finish);
  }
  assert.deepEqual(got, { content: message.content, reasoning: message.reasoning_content, roles: 1, finish: ['stop'] });
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(usage.completion_tokens_details.reasoning_tokens > 0);
});

test('tool calls go round, streamed by the helper and whole', async () => {
  const made = await client.chat.completions.create({ ...weather, tools });
  const final = await client.chat.completions.stream({ ...weather, tools }).finalChatCompletion();
  for (const { choices } of [made, final]) {
    assert.equal(choices[0].finish_reason, 'tool_calls');
    const [call, ...more] = choices[0].message.tool_calls;
    assert.deepEqual([call.function.name, JSON.parse(call.function.arguments), more], ['get_weather', { city: 'Paris' }, []]);
  }
  const call = final.choices[0].message;
  const result = { role: 'tool', tool_call_id: call.tool_calls[0].id, content: '{"temperature": 21}' };
  const answer = await client.chat.completions.create({ ...weather, tools, messages: [...weather.messages, call, result] });
  assert.match(answer.choices[0].message.content, /21/);
});

test('json of a schema', async () => {
  const schema = { type: 'object', properties: { n: { type: 'integer' } }, required: ['n'], additionalProperties: false };
  const wanted = { type: 'json_schema', json_schema: { name: 'x', strict: true, schema } };
  const made = await client.chat.completions.create({ ...france, response_format: wanted });
  assert.ok(Number.isInteger(JSON.parse(made.choices[0].message.content).n));
});

test('log-probabilities in both shapes', async () => {
  const chat = await client.chat.completions.create({ ...france, logprobs: true, top_logprobs: 2 });
  const entries = chat.choices[0].logprobs.content;
  assert.ok(entries.length > 0);
  for (const entry of entries) {
    assert.ok(Number.isFinite(entry.logprob) && entry.logprob <= 0);
    assert.equal(entry.top_logprobs.length, 2);
    assert.equal(Buffer.from(entry.bytes).toString(), entry.token);
  }
  const made = await client.completions.create({ model, prompt: 'The capital', temperature: 0, max_tokens: 4, logprobs: 0 });
  const { tokens, token_logprobs: scores } = made.choices[0].logprobs;
  assert.equal(tokens.join(''), made.choices[0].text);
  assert.equal(scores.length, tokens.length);
});

test('responses hold a conversation, streamed or whole', async () => {
  const first = await client.responses.create({ model, input: 'My name is Ada.', temperature: 0 });
  const asked = { model, input: 'What is my name?', previous_response_id: first.id, temperature: 0 };
  const whole = await client.responses.create(asked);
  assert.match(whole.output_text, /Ada/);
  let text = '';
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta;
  }
  assert.equal(text, whole.output_text);
});

test('errors are the classes that the client has for them', async () => {
  await assert.rejects(client.chat.completions.create({ ...france, model: 'other' }), (error) => {
    assert.ok(error instanceof NotFoundError);
    assert.equal(error.code, 'model_not_found');
    return true;
  });
  for (const fields of [{ temperature: -1 }, { stream: true, temperature: -1 }]) {
    await assert.rejects(client.chat.completions.create({ ...france, ...fields }), (error) => {
      assert.ok(error instanceof BadRequestError);
      assert.equal(error.param, 'temperature');
      return true;
    });
  }
});

test('leaving a stream frees its place', async () => {
  const long = { ...france, ignore_eos: true, max_tokens: 2000, stream: true };
  let seen = 0;
  for await (const chunk of await client.chat.completions.create(long)) {
    assert.ok(chunk.choices.length > 0);
    seen += 1;
    if (seen === 3) break;
  }
  await untilIdle();
});
