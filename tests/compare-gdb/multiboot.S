/*
 * Starts the micro guest where only Multiboot is spoken (QEMU's -kernel): from 32-bit protected mode without paging to
 * the 64-bit Linux boot protocol at 0x100000, where the micro guest was loaded beside this.
 *
 * Linked at 0x200000. The command line is what follows the first word of Multiboot's.
 */
        .set MICRO_ENTRY, 0x100000
        .set MULTIBOOT_MAGIC, 0x1badb002
        .set CMDLINE, 16                /* multiboot_info.cmdline */
        .set CMD_LINE_PTR, 0x228        /* boot_params.hdr.cmd_line_ptr */

        .section .text
        .code32
        .balign 4
        .long MULTIBOOT_MAGIC, 0, -MULTIBOOT_MAGIC

        .globl _start
_start:
        cli
        mov $stack_top, %esp
        mov CMDLINE(%ebx), %esi
1:      lodsb                           /* behind the kernel's own name */
        test %al, %al
        jz 2f
        cmp $' ', %al
        jne 1b
        jmp 3f
2:      dec %esi
3:      mov $boot_params, %edi
        mov %esi, CMD_LINE_PTR(%edi)

        movl $(pdpt + 3), pml4
        movl $(pd + 3), pdpt
        mov $pd, %edi
        mov $0x83, %eax                 /* present, writable, 2 MiB */
        mov $512, %ecx
4:      mov %eax, (%edi)
        add $0x200000, %eax
        add $8, %edi
        loop 4b

        mov $pml4, %eax
        mov %eax, %cr3
        mov $0x20, %eax                 /* PAE */
        mov %eax, %cr4
        mov $0xc0000080, %ecx           /* EFER: long mode */
        rdmsr
        or $0x100, %eax
        wrmsr
        mov $0x80000011, %eax           /* paging, protected mode */
        mov %eax, %cr0
        lgdt gdt_pointer
        ljmp $0x10, $5f

        .code64
5:      mov $0x18, %eax
        mov %eax, %ds
        mov %eax, %es
        mov %eax, %ss
        mov $boot_params, %esi
        mov $MICRO_ENTRY, %eax
        jmp *%rax

        .balign 8
gdt:    .quad 0, 0, 0x00af9b000000ffff, 0x00cf93000000ffff
gdt_pointer:
        .word . - gdt - 1
        .long gdt

        .section .bss
        .balign 4096
pml4:   .skip 4096
pdpt:   .skip 4096
pd:     .skip 4096
boot_params:
        .skip 4096
        .skip 4096
stack_top:
