"""The agent: AgentScope's ReActAgent with one tool. Only the line with `model` differs from an agent in production."""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, bp


def multiply(a: int, b: int) -> ToolResponse:
    """Multiply two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return ToolResponse([TextBlock(type="text", text=str(a * b))])


class DigitsAgent(Workflow):
    """Answer with the help of a tool, and pass the answer to the judge."""

    name = "digits_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode."""
        toolkit = Toolkit()
        toolkit.register_tool_function(multiply)
        agent = ReActAgent(
            name="solver",
            sys_prompt="Answer in digits.",
            model=model_tuner.as_agentscope_model("solver"),  # was: OpenAIChatModel("gpt-4o")
            formatter=OpenAIChatFormatter(),
            toolkit=toolkit,
            max_iters=3,
        )
        agent.set_console_output_enabled(False)
        answer = await agent.reply(Msg("user", workflow_task.main_query, role="user"))
        bp("ANSWER")  # stops in the debugger with --db=ANSWER
        return WorkflowOutput(metadata={"final_answer": answer.get_text_content()})
