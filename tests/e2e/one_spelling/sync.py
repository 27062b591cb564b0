"""A training loop without coroutines: every call is asked for its `result()`."""

import tinker
from batches import batch

service = tinker.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1).result()
for step in range(3):
    output = training.forward_backward(batch(step), "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    print(f"step {step}: {output.metrics['loss:sum']!r}")

sampler = training.save_weights_and_get_sampling_client().result()
prompt = tinker.ModelInput.from_ints([1, 2, 3])
params = tinker.SamplingParams(max_tokens=6, temperature=0.0)
print(f"sampled {list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)}")

path = training.save_state("state").result().path
resumed = service.create_training_client_from_state_with_optimizer(path).result()
print(f"resumed {resumed.forward(batch(0), 'cross_entropy').result().metrics['loss:sum']!r}")
run = tinker.RestClient().get_training_run(training.model_id).result()
print(f"run of {run.base_model}")
service.close().result()
