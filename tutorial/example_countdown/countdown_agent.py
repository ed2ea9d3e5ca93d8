"""An agent that plays countdown: it makes an expression of the given numbers that has the target's value."""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.tool import Toolkit

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "Use each number once, with + and -, to make the target. Answer with <answer>EXPRESSION</answer>."


class CountdownWorkflow(Workflow):
    name = "countdown_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        agent = ReActAgent(
            name="countdown_agent",
            sys_prompt=SYSTEM_PROMPT,
            model=model_tuner,
            formatter=OpenAIChatFormatter(),
            toolkit=Toolkit(),
            max_iters=1,
        )
        agent.set_console_output_enabled(False)
        reply = await agent.reply(Msg("user", workflow_task.main_query, role="user"))
        return WorkflowOutput(metadata={"final_answer": reply.get_text_content() or ""})
