//! The command `[`.

/// The most words of an expression.
const MOST_WORDS: usize = 64;

/// The tests of an expression on files.
pub(super) trait Files {
    /// Returns the size of a file; `None` if there is none.
    fn size(&self, path: &str) -> Option<u64>;
    /// Returns whether there is a folder.
    fn has_folder(&self, path: &str) -> bool;
}

/// Evaluates the words of an expression. One that makes no sense is false.
pub(super) fn is_true(words: &[String], files: &impl Files) -> bool {
    if words.len() > MOST_WORDS {
        return false;
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    words.split(|word| *word == "-o").any(|part| {
        part.split(|word| *word == "-a")
            .all(|part| term(part, files))
    })
}

fn term(words: &[&str], files: &impl Files) -> bool {
    match words {
        // Three words with an operator in the middle come first: `[ ! = x ]` compares.
        [left, operator, right] if compare(left, operator, right).is_some() => {
            compare(left, operator, right).unwrap_or_default()
        }
        ["!", rest @ ..] => !term(rest, files),
        ["(", inner @ .., ")"] => term(inner, files),
        [word] => !word.is_empty(),
        ["-n", word] => !word.is_empty(),
        ["-z", word] => word.is_empty(),
        ["-e", path] => files.size(path).is_some() || files.has_folder(path),
        ["-f", path] => files.size(path).is_some(),
        ["-s", path] => files.size(path).is_some_and(|size| size > 0),
        ["-d", path] => files.has_folder(path),
        _ => false,
    }
}

fn compare(left: &str, operator: &str, right: &str) -> Option<bool> {
    let number = |text: &str| text.trim().parse::<i64>().unwrap_or_default();
    Some(match operator {
        "=" | "==" => left == right,
        "!=" => left != right,
        "<" => left < right,
        ">" => left > right,
        "-eq" => number(left) == number(right),
        "-ne" => number(left) != number(right),
        "-lt" => number(left) < number(right),
        "-le" => number(left) <= number(right),
        "-gt" => number(left) > number(right),
        "-ge" => number(left) >= number(right),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Some3;

    impl Files for Some3 {
        fn size(&self, path: &str) -> Option<u64> {
            (path == "/file").then_some(3)
        }

        fn has_folder(&self, path: &str) -> bool {
            path == "/folder"
        }
    }

    #[test]
    fn expressions_have_the_values_that_grub_gives_them() {
        let rows = [
            ("", false),
            ("x", true),
            ("xy = xy", true),
            ("x != xy", true),
            ("! = x", false),
            ("! x", false),
            ("! -f /none", true),
            ("-s /file -a -d /folder", true),
            ("-s /folder -o -e /folder", true),
            ("-n", true),
            ("2 -lt 10", true),
            ("a b c d", false),
        ];
        for (text, wanted) in rows {
            let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            assert_eq!(is_true(&words, &Some3), wanted, "{text}");
        }
        assert!(is_true(&["-z".to_owned(), String::new()], &Some3));
        assert!(!is_true(&vec!["x".to_owned(); 1000], &Some3));
    }
}
