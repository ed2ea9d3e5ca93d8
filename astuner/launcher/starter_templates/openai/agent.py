"""The agent: code that calls a model with the OpenAI SDK. Only the line with `client` differs from production."""

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, bp


class DigitsAgent(Workflow):
    """Ask the model once, and pass its answer to the judge."""

    name = "digits_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode."""
        client = model_tuner.as_raw_openai_sdk_client()  # was: AsyncOpenAI()
        answer = await client.chat.completions.create(
            model="astuner",
            messages=[
                {"role": "system", "content": "Answer in digits."},
                {"role": "user", "content": workflow_task.main_query},
            ],
        )
        bp("ANSWER")  # stops in the debugger with --db=ANSWER
        return WorkflowOutput(metadata={"final_answer": answer.choices[0].message.content})
