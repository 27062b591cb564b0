"""A layer that makes failed training calls again, and errors as programs tell them apart."""

import tinker
from batches import batch
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.retryable_exception import RetryableException

original = tinker.TrainingClient.forward_backward
tries = []


def patient(self, data, loss_fn, *args, **kwargs):
    for attempt in range(3):
        tries.append(attempt)
        future = original(self, data, loss_fn, *args, **kwargs)
        try:
            future.result(timeout=30)
        except (RetryableException, tinker.APIConnectionError) as error:
            print("again:", isinstance(error, RetryableException))
        else:
            return future
    raise RuntimeError("three times in vain")


tinker.TrainingClient.forward_backward = patient

service = tinker.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
output = training.forward_backward(batch(0), "cross_entropy").result()
print(tries, round(output.metrics["loss:sum"], 4))

try:
    training.optim_step(tinker.AdamParams()).result()
except tinker.RequestFailedError as error:
    print(error.category.value, isinstance(error, tinker.TinkerError))

for call in (
    lambda: RestClient().get_training_run("nobody").result(),
    lambda: training.forward_backward([], "cross_entropy"),
    lambda: training.optim_step(tinker.AdamParams(), adam_params=tinker.AdamParams()),
    lambda: training.save_state("no such: name?").result(),
    service.create_sampling_client,
    lambda: service.create_sampling_client(model_path="no-scheme"),
    lambda: tinker.ParsedCheckpointTinkerPath.from_tinker_path("tinker://x"),
):
    try:
        call()
    except (tinker.TinkerError, ValueError) as error:
        print(isinstance(error, tinker.NotFoundError), isinstance(error, ValueError))

training.optim_step(adam_params=tinker.AdamParams()).result()
print("still usable")
service.close("errored", detail="on purpose").result()
try:
    service.get_server_capabilities()
except RuntimeError:
    print("closed")
