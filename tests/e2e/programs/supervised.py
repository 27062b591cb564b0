"""A supervised loop: the next batch is submitted before the last one's result is awaited."""

import asyncio

import tinker
from batches import batch  # beside this file, as recipes have their helpers
from tinker import types


async def main() -> None:
    service = tinker.ServiceClient(user_metadata={"recipe": "sl"})
    training = await service.create_lora_training_client_async("Qwen/Qwen3-8B", rank=8, seed=1)
    submitted = []
    for step in range(4):
        params = types.AdamParams(learning_rate=1e-4 * (step + 1), beta2=0.95)
        forward = await training.forward_backward_async(batch(step), loss_fn="cross_entropy")
        submitted.append((forward, await training.optim_step_async(params)))
    for forward, step_future in submitted:
        output = await forward.result_async()
        step_metrics = (await step_future.result_async()).metrics
        print(output.loss_fn_output_type, round(output.metrics["loss:sum"], 4), step_metrics)
        print([len(one["logprobs"].data) for one in output.loss_fn_outputs])
    saved = await (await training.save_state_async("final", ttl_seconds=3600)).result_async()
    sampler_path = (await (await training.save_weights_for_sampler_async("final"))).path
    print(saved.path, sampler_path, tinker.ParsedCheckpointTinkerPath.from_tinker_path(saved.path))
    resumed = await service.create_training_client_from_state_with_optimizer_async(saved.path)
    for client in (training, resumed):
        evaluated = await (await client.forward_async(batch(9), "cross_entropy")).result_async()
        print(round(evaluated.metrics["loss:sum"], 4))
    info = await training.get_info_async()
    print(info.model_data.model_name, info.lora_rank, info.is_lora)


asyncio.run(main())
