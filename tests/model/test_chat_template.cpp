// Chat templates: recognized by content, rendered as the models' own Jinja text does.
#include <algorithm>
#include <catch2/catch.hpp>

#include "base/error.h"
#include "model/tokenizer.h"
#include "tests/model/tokenizer_builder.h"
#include "tests/support/paths.h"

namespace oscar {
namespace {

std::shared_ptr<const Tokenizer> with_template(const std::string& jinja) {
  const oscar_test::TemporaryFolder folder;
  oscar_test::write_file(folder / "tokenizer.json", oscar_test::small_tokenizer().json().dump());
  oscar_test::write_file(folder / "chat_template.jinja", jinja);
  return Tokenizer::load(folder.path().string());
}

std::string render(const std::string& name, const std::vector<ChatMessage>& messages,
                   bool generation_prompt = true, bool thinking = true) {
  static const auto tokenizer = with_template("");
  ChatOptions options;
  options.template_name = name;
  options.add_generation_prompt = generation_prompt;
  options.thinking = thinking;
  return render_chat(*tokenizer, messages, options);
}

std::string message_of(const std::string& jinja, const std::string& name,
                       const std::vector<ChatMessage>& messages) {
  try {
    render_chat(*with_template(jinja), messages, true, name);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// First 40 characters of what the recognized template renders.
std::string recognized(const std::string& jinja) {
  return render_chat(*with_template(jinja), {{"user", "Hi"}}, true).substr(0, 40);
}

const std::vector<ChatMessage> kHi = {{"user", "Hi"}};

}  // namespace

TEST_CASE("ChatML and its default system messages") {
  CHECK(render("chatml", kHi) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  CHECK(render("chatml", {{"system", "S"}, {"user", " x "}, {"assistant", "y"}}, false) ==
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n x <|im_end|>\n"
        "<|im_start|>assistant\ny<|im_end|>\n");
  CHECK(render("smollm2", kHi) ==
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  CHECK(render("qwen2.5", kHi, false) ==
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n");
  CHECK(render("smollm2", {{"system", "S"}, {"user", "x"}}, false) ==
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nx<|im_end|>\n");
}

TEST_CASE("Qwen3 keeps the reasoning of the last turn only") {
  CHECK(render("qwen3", kHi) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  CHECK(render("qwen3", kHi, true, false) ==
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
  CHECK(render("qwen3-thinking", kHi) ==
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n");
  // Before the last user message the think block goes.
  CHECK(render("qwen3", {{"user", "1"}, {"assistant", "<think>\nr\n</think>\n\nA"}, {"user", "2"}},
               false) ==
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\n2<|im_end|>\n");
  // After it, it stays; a last answer without one gets an empty block.
  CHECK(render("qwen3", {{"user", "1"}, {"assistant", "<think>\nr\n</think>\n\nA"}}, false) ==
        "<|im_start|>user\n1<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nr\n</think>\n\nA<|im_end|>\n");
  CHECK(render("qwen3", {{"user", "1"}, {"assistant", "A"}}, false) ==
        "<|im_start|>user\n1<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nA<|im_end|>\n");
  // A tool's answer is no new question.
  CHECK(render("qwen3",
               {{"user", "1"},
                {"assistant", "<think>\nr\n</think>\n\nA"},
                {"user", "<tool_response>x</tool_response>"},
                {"assistant", "B"}},
               false)
            .find("assistant\n<think>\nr\n</think>\n\nA<|im_end|>") != std::string::npos);
}

TEST_CASE("Llama 3 and GLM") {
  CHECK(render("llama3", {{"system", " S "}, {"user", "Hi"}}) ==
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n");
  CHECK(render("llama3.1", kHi, false) ==
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>");
  CHECK(render("glm4", {{"system", "S"}, {"user", "Hi"}}) ==
        "[gMASK]<sop><|system|>\nS<|user|>\nHi<|assistant|>");
  CHECK(render("glm4.6", {{"user", "1"}, {"assistant", "<think>r</think>A"}, {"user", "2"}}, true,
               false) ==
        "[gMASK]<sop><|user|>\n1/nothink<|assistant|>\n<think></think>\nA<|user|>\n2/nothink"
        "<|assistant|>\n<think></think>");
}

TEST_CASE("templates are recognized by content") {
  const std::string loop =
      "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>'}}";
  CHECK(recognized(loop) ==
        std::string("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").substr(0, 40));
  CHECK(recognized(loop + "{{- '<|im_start|>system\\n' + messages[0].content }}") ==
        recognized(loop));
  CHECK(recognized(loop + "You are a helpful AI assistant named SmolLM, trained by Hugging Face") ==
        "<|im_start|>system\nYou are a helpful AI ");
  CHECK(recognized(loop + "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.") ==
        "<|im_start|>system\nYou are Qwen, created");
  CHECK(recognized("{{ '[gMASK]<sop>' }}") == "[gMASK]<sop><|user|>\nHi<|assistant|>");
  CHECK(recognized("<|start_header_id|> <|eot_id|>").starts_with("<|begin_of_text|>"));
}

TEST_CASE("unknown templates name the option") {
  const auto names_option = [](const std::string& message) {
    INFO(message);
    CHECK(message.find("--chat-template") != std::string::npos);
    CHECK(message.find("chatml") != std::string::npos);
  };
  names_option(message_of("", "", kHi));
  names_option(message_of("[INST] {{ x }} [/INST]", "", kHi));
  names_option(message_of("", "mistral", kHi));
  // ChatML with a system text of its own would be rendered wrongly as plain ChatML.
  names_option(message_of("{{ '<|im_start|>system\nBe kind<|im_end|>\n' }} <|im_start|> <|im_end|>",
                          "", kHi));
  CHECK(message_of("", "chatml", {}).find("no messages") != std::string::npos);
  CHECK(message_of("", "chatml", {{"tool", "x"}}).find("role \"tool\"") != std::string::npos);
}

TEST_CASE("the demo model's template is recognized", "[model]") {
  const auto path = oscar_test::demo_model();
  SKIP_UNLESS(path, "no demo model");
  const auto tokenizer = Tokenizer::load(path->string());
  const std::string text = render_chat(*tokenizer, kHi, true);
  CHECK(text ==
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  const auto ids = encode_prompt(*tokenizer, text);
  CHECK(ids.front() == 1);
  CHECK(std::count(ids.begin(), ids.end(), 1) == 3);
}

TEST_CASE("Qwen2.5's template is recognized") {
  const auto path = oscar_test::qwen_model();
  SKIP_UNLESS(path, "no Qwen2.5 model");
  CHECK(render_chat(*Tokenizer::load(path->string()), kHi, true)
            .starts_with("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud."));
}

}  // namespace oscar
