// Renders conversations with the chat templates that are recognized by content (formats.md 13).
#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"
#include "model/tokenizer.h"

namespace oscar {
namespace {

enum class Family {
  kChatMl,
  kSmollm2,
  kQwen25,
  kQwen3,
  kQwen3Thinking,
  kLlama3,
  kLlama31,
  kGlm4,
  kGlm46
};

struct Named {
  const char* name;
  Family family;
};
constexpr std::array kFamilies = {
    Named{"chatml", Family::kChatMl},
    Named{"smollm2", Family::kSmollm2},
    Named{"qwen2.5", Family::kQwen25},
    Named{"qwen3", Family::kQwen3},
    Named{"qwen3-thinking", Family::kQwen3Thinking},
    Named{"llama3", Family::kLlama3},
    Named{"llama3.1", Family::kLlama31},
    Named{"glm4", Family::kGlm4},
    Named{"glm4.6", Family::kGlm46},
};

constexpr std::string_view kSmollm2System =
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
constexpr std::string_view kQwen25System =
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

std::string known_names() {
  std::string names;
  for (const Named& named : kFamilies)
    names += (names.empty() ? "" : ", ") + std::string(named.name);
  return names;
}

// True when the template writes a system turn whose text stands in the template itself.
bool has_literal_system_text(std::string_view text) {
  constexpr std::string_view kOpening = "<|im_start|>system";
  for (size_t at = text.find(kOpening); at != text.npos; at = text.find(kOpening, at + 1)) {
    std::string_view rest = text.substr(at + kOpening.size());
    if (rest.starts_with("\\n")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with("\n")) {
      rest.remove_prefix(1);
    }
    // A string literal that ends here continues with the message of the conversation.
    if (!rest.empty() && rest[0] != '\'' && rest[0] != '"' && rest[0] != '{') return true;
  }
  return false;
}

Family recognize(std::string_view text) {
  const auto has = [&](std::string_view part) { return text.find(part) != text.npos; };
  OSCAR_CHECK(!text.empty(),
              "the model's files have no chat template: choose one with --chat-template (",
              known_names(), ")");
  if (has("<|start_header_id|>") && has("<|eot_id|>")) {
    return has("Cutting Knowledge Date") ? Family::kLlama31 : Family::kLlama3;
  }
  if (has("[gMASK]<sop>")) return has("/nothink") ? Family::kGlm46 : Family::kGlm4;
  if (has("<|im_start|>") && has("<|im_end|>")) {
    if (has(kSmollm2System)) return Family::kSmollm2;
    if (has(kQwen25System)) return Family::kQwen25;
    if (has("enable_thinking")) return Family::kQwen3;
    if (has("assistant\\n<think>\\n' }}") || has("assistant\\n<think>\\n'}}")) {
      return Family::kQwen3Thinking;
    }
    if (!has("<think>") && !has_literal_system_text(text)) return Family::kChatMl;
  }
  fail("the model's chat template is not one of the known ones: choose with --chat-template (",
       known_names(), ")");
}

std::string_view strip_newlines(std::string_view text) {
  while (text.starts_with('\n')) text.remove_prefix(1);
  while (text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

std::string trim(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n\v\f";
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == text.npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(kSpaces) - first + 1));
}

std::string chatml_turn(std::string_view role, std::string_view content) {
  return cat("<|im_start|>", role, "\n", content, "<|im_end|>\n");
}

struct Reasoned {
  std::string reasoning, answer;
};
// Splits an assistant message at its think block, as the Qwen3 template does.
Reasoned split_reasoning(std::string_view content) {
  constexpr std::string_view kOpen = "<think>", kClose = "</think>";
  const size_t last_close = content.rfind(kClose);
  if (last_close == content.npos) return {"", std::string(content)};
  std::string_view answer = content.substr(last_close + kClose.size());
  while (answer.starts_with('\n')) answer.remove_prefix(1);
  std::string_view reasoning = content.substr(0, content.find(kClose));
  const size_t open = reasoning.rfind(kOpen);
  if (open != reasoning.npos) reasoning.remove_prefix(open + kOpen.size());
  return {std::string(strip_newlines(reasoning)), std::string(answer)};
}

bool is_tool_response(std::string_view content) {
  return content.starts_with("<tool_response>") && content.ends_with("</tool_response>");
}

std::string render_chatml(const std::vector<ChatMessage>& messages, std::string_view system) {
  std::string text;
  if (!system.empty() && messages[0].role != "system") text += chatml_turn("system", system);
  for (const ChatMessage& message : messages) text += chatml_turn(message.role, message.content);
  return text;
}

std::string render_qwen3(const std::vector<ChatMessage>& messages) {
  size_t last_query = messages.size() - 1;
  for (size_t i = messages.size(); i-- > 0;) {
    if (messages[i].role != "user" || is_tool_response(messages[i].content)) continue;
    last_query = i;
    break;
  }
  std::string text;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role != "assistant") {
      text += chatml_turn(message.role, message.content);
      continue;
    }
    const Reasoned parts = split_reasoning(message.content);
    if (i > last_query && (i + 1 == messages.size() || !parts.reasoning.empty())) {
      std::string_view answer = parts.answer;
      while (answer.starts_with('\n')) answer.remove_prefix(1);
      text += chatml_turn("assistant", cat("<think>\n", parts.reasoning, "\n</think>\n\n", answer));
    } else {
      text += chatml_turn("assistant", parts.answer);
    }
  }
  return text;
}

std::string llama3_turn(std::string_view role, std::string_view content) {
  return cat("<|start_header_id|>", role, "<|end_header_id|>\n\n", content, "<|eot_id|>");
}

std::string render_llama3(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                          bool dated_system) {
  std::string text = "<|begin_of_text|>";
  size_t first = 0;
  if (dated_system) {
    std::string system;
    if (messages[0].role == "system") {
      system = trim(messages[0].content);
      first = 1;
    }
    text += llama3_turn(
        "system",
        cat("Cutting Knowledge Date: December 2023\nToday Date: ", options.date, "\n\n", system));
  }
  for (size_t i = first; i < messages.size(); ++i) {
    text += llama3_turn(messages[i].role, trim(messages[i].content));
  }
  return text;
}

std::string render_glm(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                       bool reasoning_model) {
  std::string text = "[gMASK]<sop>";
  for (const ChatMessage& message : messages) {
    text += cat("<|", message.role, "|>\n");
    if (reasoning_model && message.role == "assistant") {
      text += cat("<think></think>\n", trim(split_reasoning(message.content).answer));
    } else {
      text += message.content;
      const bool marked = reasoning_model && !options.thinking && message.role == "user" &&
                          !message.content.ends_with("/nothink");
      if (marked) text += "/nothink";
    }
  }
  return text;
}

std::string generation_prompt(Family family, bool thinking) {
  switch (family) {
    case Family::kChatMl:
    case Family::kSmollm2:
    case Family::kQwen25:
      return "<|im_start|>assistant\n";
    case Family::kQwen3:
      return thinking ? "<|im_start|>assistant\n"
                      : "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    case Family::kQwen3Thinking:
      return "<|im_start|>assistant\n<think>\n";
    case Family::kLlama3:
    case Family::kLlama31:
      return "<|start_header_id|>assistant<|end_header_id|>\n\n";
    case Family::kGlm4:
      return "<|assistant|>";
    case Family::kGlm46:
      return thinking ? "<|assistant|>" : "<|assistant|>\n<think></think>";
  }
  fail("unknown chat template family");
}

Family family_of(const Tokenizer& tokenizer, const std::string& name) {
  if (name.empty()) return recognize(tokenizer.chat_template());
  for (const Named& named : kFamilies) {
    if (name == named.name) return named.family;
  }
  fail("--chat-template ", name, " is unknown (known: ", known_names(), ")");
}

}  // namespace

std::vector<std::string> chat_template_names() {
  std::vector<std::string> names;
  for (const Named& named : kFamilies) names.emplace_back(named.name);
  return names;
}

std::string render_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                        const ChatOptions& options) {
  const Family family = family_of(tokenizer, options.template_name);
  OSCAR_CHECK(!messages.empty(), "chat: the conversation has no messages");
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    OSCAR_CHECK(role == "system" || role == "user" || role == "assistant", "chat: message ", i,
                " has role \"", role, "\", expected system, user or assistant");
  }
  std::string text;
  switch (family) {
    case Family::kChatMl:
      text = render_chatml(messages, "");
      break;
    case Family::kSmollm2:
      text = render_chatml(messages, kSmollm2System);
      break;
    case Family::kQwen25:
      text = render_chatml(messages, kQwen25System);
      break;
    case Family::kQwen3:
    case Family::kQwen3Thinking:
      text = render_qwen3(messages);
      break;
    case Family::kLlama3:
    case Family::kLlama31:
      text = render_llama3(messages, options, family == Family::kLlama31);
      break;
    case Family::kGlm4:
    case Family::kGlm46:
      text = render_glm(messages, options, family == Family::kGlm46);
      break;
  }
  if (options.add_generation_prompt) text += generation_prompt(family, options.thinking);
  return text;
}

std::string render_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                        bool add_generation_prompt, const std::string& template_name) {
  ChatOptions options;
  options.template_name = template_name;
  options.add_generation_prompt = add_generation_prompt;
  return render_chat(tokenizer, messages, options);
}

}  // namespace oscar
