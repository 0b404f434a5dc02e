// What the three clients are asked alike. The server comes in the environment: GLM53_TEST_URL (without a path) and GLM53_TEST_MODEL.
import assert from 'node:assert/strict';

function given(name) {
  const value = process.env[name];
  assert.ok(value, `${name} is not set: these tests are run by tests/e2e/test_clients_node.py`);
  return value;
}

export const url = given('GLM53_TEST_URL');
export const model = given('GLM53_TEST_MODEL');
export const FRANCE = 'What is the capital of France?';
export const WEATHER = 'What is the weather in Paris?';
export const CITY = {
  type: 'object',
  properties: { city: { type: 'string', description: 'City name' } },
  required: ['city'],
};
export const DESCRIPTION = 'Get the current weather in a city';

// Waits until the worker runs nothing: a client that went away has freed its place.
export async function untilIdle(timeoutMs = 10_000) {
  const deadline = Date.now() + timeoutMs;
  for (;;) {
    const { engine } = await (await fetch(`${url}/stats`)).json();
    if (engine.running_requests === 0 && engine.queue_depth === 0) return;
    assert.ok(Date.now() < deadline, `still running after ${timeoutMs} ms: ${JSON.stringify(engine)}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}
