// The official Anthropic client for Node, as agent command lines use it.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import Anthropic, { BadRequestError, NotFoundError } from '@anthropic-ai/sdk';
import { CITY, DESCRIPTION, FRANCE, WEATHER, model, url } from './common.mjs';

const client = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0, timeout: 60_000 });
const tools = [{ name: 'get_weather', description: DESCRIPTION, input_schema: CITY }];
const asked = { model, max_tokens: 2048, temperature: 0, thinking: { type: 'enabled', budget_tokens: 1024 }, tools };
const question = [{ role: 'user', content: WEATHER }];

test('a stream builds the whole message', async () => {
  const fields = { ...asked, tools: undefined, messages: [{ role: 'user', content: FRANCE }] };
  const whole = await client.messages.create(fields);
  const final = await client.messages.stream(fields).finalMessage();
  for (const made of [whole, final]) {
    assert.deepEqual(made.content.map((block) => block.type), ['thinking', 'text']);
    assert.match(made.content[1].text, /Paris/);
    assert.equal(made.stop_reason, 'end_turn');
  }
  assert.deepEqual(final.content.map((block) => block.text), whole.content.map((block) => block.text));
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test('a tool goes round', async () => {
  const made = await client.messages.stream({ ...asked, messages: question }).finalMessage();
  assert.equal(made.stop_reason, 'tool_use');
  const call = made.content.at(-1);
  assert.deepEqual([call.type, call.name, call.input], ['tool_use', 'get_weather', { city: 'Paris' }]);
  const result = { role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: '{"temperature": 21}' }] };
  const history = [...question, { role: 'assistant', content: made.content }, result];
  const answer = await client.messages.create({ ...asked, messages: history });
  assert.match(answer.content.at(-1).text, /21/);
  assert.ok((await client.messages.countTokens({ model, messages: history, tools })).input_tokens > 20);
});

test('errors are the classes that the client has for them', async () => {
  await assert.rejects(client.messages.create({ ...asked, model: 'other', messages: question }), NotFoundError);
  await assert.rejects(client.messages.create({ ...asked, max_tokens: -1, messages: question }), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.equal(error.error.error.type, 'invalid_request_error');
    return true;
  });
});
